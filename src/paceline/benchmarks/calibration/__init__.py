"""What this machine reaches: the measurements behind a Calibration."""
