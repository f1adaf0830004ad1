"""Turns a fit and a compute budget into a model size and shape."""
