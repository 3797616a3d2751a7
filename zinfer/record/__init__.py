"""Records: stored measurements, their writers and readers."""
