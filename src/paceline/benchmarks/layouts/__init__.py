"""Training steps under layouts of several axes, and the lanes of their pipelines."""
