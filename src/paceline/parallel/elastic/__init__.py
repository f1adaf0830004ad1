"""Replicas of a model that come and go while the others train on, by torchft."""
