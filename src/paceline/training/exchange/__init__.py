"""Models on their way out of runs and into them, one process at a time."""
