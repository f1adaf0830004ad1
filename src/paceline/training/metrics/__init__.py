"""What a run measures of itself, and who is told."""
