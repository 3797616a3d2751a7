"""Operating system: files, signals, temporary folders, memory, terminals, and this machine."""
