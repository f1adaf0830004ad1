"""Collectives measured alone: all-reduce, all-gather and the others by size."""
