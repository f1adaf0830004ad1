"""Findings derived from measurements, one module per topic."""
