"""Data set of published training-run measurements, with sources."""
