"""Ranks and what they do together."""

from paceline.parallel.launch import RankError, RankPool, run_ranks
from paceline.parallel.placement import Placement, is_launched
from paceline.parallel.process_group import CollectiveError, Session, distributed_session

__all__ = [
    "CollectiveError",
    "Placement",
    "RankError",
    "RankPool",
    "Session",
    "distributed_session",
    "is_launched",
    "run_ranks",
]
