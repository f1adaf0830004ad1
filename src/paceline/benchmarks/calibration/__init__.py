"""Measurements of this machine's speed, the basis of a Calibration."""
