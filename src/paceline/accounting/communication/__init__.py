"""Gradient buckets, the cost of collectives, and its overlap with backward."""
