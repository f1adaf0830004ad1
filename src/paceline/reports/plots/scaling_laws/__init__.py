"""Plots of scaling laws: fits of a sweep, and their accuracy when extrapolated."""
