"""The tests. None of their waits is a measurement."""

PATIENCE_S = 600  # until what does not come is a failure: a machine under load may take minutes to start a process
