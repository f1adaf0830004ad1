"""Layouts of several axes, on torch's own engine."""
