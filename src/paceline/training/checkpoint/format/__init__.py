"""File format of checkpoints; reading it does not need torch."""
