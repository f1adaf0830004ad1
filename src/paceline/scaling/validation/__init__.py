"""Synthetic sweeps with a known answer, and how often intervals hold it."""
