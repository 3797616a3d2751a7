"""Weights that are off the device: packed, kept, and brought back layer by layer. Knows neither KV cache nor
experts."""
