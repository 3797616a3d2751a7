"""Quantised weights: their values, and how zinfer makes them.

`zinfer.checkpoint.quantization` says which tensors of a checkpoint belong together; nothing there computes.
"""
