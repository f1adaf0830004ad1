"""Names of the files in a run's directory."""

import pathlib

from paceline.records import Record, RecordStore

CONFIG = "config.toml"
ENVIRONMENT = "environment.json"
EXPECTATION = "expectation.json"
"""Predictions and limits, written before the first step."""
METRICS = "metrics.jsonl"
RECORD = "record.jsonl"
"""Record of the finished run."""
CHECKPOINTS = "checkpoints"
DIVERGED = "diverged"
"""State before a rejected step: its loss or gradients were not finite, or its loss was a spike."""
STACKS = "stacks"
"""Stack traces of each rank when a step hung or a collective failed."""


def last_record(directory: pathlib.Path) -> Record:
    """Returns the newest record of the finished run in a directory."""
    return list(RecordStore(directory / RECORD).read())[-1]
