"""Reads traces of any size into columns."""
