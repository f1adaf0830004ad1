"""Metrics of a run, and the observers that receive them."""
