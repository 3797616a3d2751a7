"""Routed experts: which of them come when, and kernels for few tokens."""
