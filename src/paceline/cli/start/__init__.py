"""What a newcomer meets first: goals, and a demonstration."""
