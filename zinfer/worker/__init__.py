"""The worker: the process that holds the device, and both ends of the pipe to it."""
