"""Fits of the loss surface, and their intervals."""
