"""Run language models larger than the GPU's memory, measure every way of doing it, and choose."""

__version__ = "0.1.0"
