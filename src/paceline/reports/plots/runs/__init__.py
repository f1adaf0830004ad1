"""Plots of a training run."""
