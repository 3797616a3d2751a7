"""Records: what was measured, as it is stored, and how it is written and read back."""
