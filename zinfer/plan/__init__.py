"""Planning: what fits, on which tier, and how fast it can be, before anything runs."""
