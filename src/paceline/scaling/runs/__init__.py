"""Runs of a sweep, and how they are read."""
