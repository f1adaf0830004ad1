"""Converts rows to the names and values that trackers show."""

from typing import Any

import msgspec

from paceline.training.config import RunConfig
from paceline.training.metrics.expectation import Expectation
from paceline.training.metrics.rows import EvaluationRow, MetricsRow, StepRow


def row_values(row: MetricsRow, expected: Expectation) -> dict[str, float]:
    """Returns the values of a row by name; an event has none."""
    values: dict[str, float | None] = {}
    if isinstance(row, StepRow):
        values = {
            "train/loss": row.loss,
            "train/gradient_norm": row.gradient_norm,
            "train/learning_rate": row.learning_rate,
            "train/tokens": row.tokens,
            "time/step_s": row.step_time_s,
            "time/predicted_step_s": expected.step_time_s,
            "time/data_wait_s": row.data_wait_s,
            "time/exposed_communication_s": row.exposed_communication_s,
            "speed/tokens_per_s": expected.tokens_per_s(row.step_time_s),
            "speed/model_flops_utilization": expected.utilization(row.step_time_s),
            "memory/bytes": row.memory_bytes,
        }
    elif isinstance(row, EvaluationRow):
        values = {
            "heldout/loss": row.loss,
            "heldout/bits_per_byte": row.bits_per_byte,
            "time/evaluation_s": row.time_s,
        }
    return {name: float(value) for name, value in values.items() if value is not None}


def config_values(config: RunConfig) -> dict[str, Any]:
    """Returns a config as nested dicts and plain values."""
    values: dict[str, Any] = msgspec.to_builtins(config)
    return values
