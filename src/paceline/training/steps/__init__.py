"""One training step: its micro-batches, its update, its learning rate."""
