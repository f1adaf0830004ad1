"""Ranks and what they do together."""

from paceline.parallel.launch import RankError, run_ranks

__all__ = ["RankError", "run_ranks"]
