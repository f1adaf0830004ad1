"""Measurements: cases in, records out. Kept empty, so that the configs load without torch."""
