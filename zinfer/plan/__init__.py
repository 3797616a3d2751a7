"""Planning: what fits where, and how fast it can be, before anything runs."""
