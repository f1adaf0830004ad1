"""Pictures of a training run."""
