"""Measurements: cases in, records out. Stays empty, so that config loads without torch."""
