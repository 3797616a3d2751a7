"""Quantised weights: their values, and how zinfer makes them."""
