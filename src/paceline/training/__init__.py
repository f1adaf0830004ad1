"""Training runs: from a config to a model, resumed where they stopped."""
