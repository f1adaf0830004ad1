"""Records of measurements and predictions, with their environment and method, as JSON Lines."""

from paceline.records.environment import Environment, capture_environment
from paceline.records.kinds import Kind, find_kind, known_kinds
from paceline.records.schema import CaseValue, Metric, Outcome, Record, join_key
from paceline.records.store import RecordStore, decode_plan, encode_plan, latest_per_case

__all__ = [
    "CaseValue",
    "Environment",
    "Kind",
    "Metric",
    "Outcome",
    "Record",
    "RecordStore",
    "capture_environment",
    "decode_plan",
    "encode_plan",
    "find_kind",
    "join_key",
    "known_kinds",
    "latest_per_case",
]
