"""Chaos testing: injects faults into a run that should survive them."""
