"""Fits of the loss surface, with intervals."""
