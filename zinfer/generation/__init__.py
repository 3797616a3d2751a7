"""Generation: tokens and text out of a loaded engine."""
