"""Breaks down the time of each step."""
