"""Training steps under layouts of several axes, and the timelines of their pipelines."""
