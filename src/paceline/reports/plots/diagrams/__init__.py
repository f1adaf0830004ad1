"""Drawings that explain: overlap, tiles of attention, shards."""
