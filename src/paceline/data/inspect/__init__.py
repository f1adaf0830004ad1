"""Inspection of a prepared dataset: its integrity and its contents."""
