"""Parallel layouts of a run: derived from its config, and applied to its model."""
