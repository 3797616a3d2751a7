"""Tests of zinfer. Their waits are not measurements."""

PATIENCE_S = 600  # time-out of a wait, after which the test fails: a busy machine may take minutes to start a process
