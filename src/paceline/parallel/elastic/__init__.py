"""Elastic training with torchft: replicas join and leave while the others continue."""
