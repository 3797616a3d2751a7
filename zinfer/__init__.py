"""Run models larger than the GPU, measure every way, and choose."""

__version__ = "0.2.0"
