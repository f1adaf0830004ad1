"""Runs of a sweep and their readers."""
