"""Chaos: faults on purpose, in a run that is to survive them."""
