"""The order of samples, as a pure function of seed and position; free of torch."""
