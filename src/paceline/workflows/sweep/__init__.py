"""Sweeps of small runs that determine how large a model to train: design, execution, resume."""
