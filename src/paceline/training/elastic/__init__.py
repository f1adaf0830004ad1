"""Elastic training: replicas may leave and rejoin during a run."""
