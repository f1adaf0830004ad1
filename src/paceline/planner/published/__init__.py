"""Published measurements of real training runs: a data set with its sources."""
