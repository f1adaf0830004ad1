"""Ranks that are watched, and started again when one of them dies or hangs."""
