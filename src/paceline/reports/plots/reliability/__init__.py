"""Plots of reliability: goodput by number of devices, and runs with injected faults."""
