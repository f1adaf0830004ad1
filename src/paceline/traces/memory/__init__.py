"""Allocations over time, by category and line of code."""
