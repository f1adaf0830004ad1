"""Supervision of ranks: heartbeats, and restarts after a rank dies or hangs."""
