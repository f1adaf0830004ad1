"""Framework calibrations: step-time constants per device, fitted to measured runs."""
