"""Buckets, the cost of collectives, and how much of it backward hides."""
