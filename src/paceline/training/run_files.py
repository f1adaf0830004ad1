"""What is in the directory of a run."""

CONFIG = "config.toml"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
DIVERGED = "diverged"
"""The state before a step whose loss or gradients were not finite."""
