"""Jobs: control of workers from the parent process (sweeps, batch files, accuracy studies)."""
