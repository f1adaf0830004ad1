"""What frameworks reach on devices: constants of the step time, fitted to measured runs."""
