"""Explanatory diagrams: overlap of communication, and tiles of attention."""
