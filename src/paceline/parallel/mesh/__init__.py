"""Parallel layouts with several axes, built on torch's own parallelism."""
