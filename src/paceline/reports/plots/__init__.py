"""Plots of records."""
