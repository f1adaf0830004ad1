"""Selects which runs to train next."""
