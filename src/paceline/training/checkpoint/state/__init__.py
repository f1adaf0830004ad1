"""What a checkpoint holds of a training run, the same for every strategy and world size."""
