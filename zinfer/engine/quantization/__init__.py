"""Quantised weights: what their codes stand for, how zinfer makes them, and where from.

`zinfer.checkpoint.quantization` says which tensors of a checkpoint belong together; nothing there computes.
"""
