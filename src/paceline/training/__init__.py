"""Training: a run from a config to a model."""
