"""State of a training run in a checkpoint, the same for every strategy and world size."""
