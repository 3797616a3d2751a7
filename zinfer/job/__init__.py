"""Jobs: what drives workers from the parent process (sweeps, batch files, accuracy studies)."""
