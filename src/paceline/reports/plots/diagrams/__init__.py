"""Drawings that explain: overlap, and tiles of attention."""
