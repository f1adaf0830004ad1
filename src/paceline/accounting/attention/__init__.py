"""Attention's FLOPs, bytes and occupancy."""
