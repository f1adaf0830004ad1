"""Metrics rows of a fictitious run."""

from typing import Any

from paceline.core.plan import Estimate
from paceline.training.forecast import Forecast
from paceline.training.metrics import EvaluationRow, EventRow, StepRow

CORRECTED = {
    "step_time_s": Estimate(value=0.45, low=0.3, high=0.6),
    "memory_bytes": Estimate(value=2**29, low=2**28, high=2**30),
}
"""Step time and memory of the run, corrected by earlier runs."""


def expectation(**changes: Any) -> Forecast:
    """Returns the expectation of a run of 100 steps."""
    known: dict[str, Any] = {
        "num_steps": 100,
        "tokens_per_step": 1000,
        "flops_per_step": 1e9,
        "memory_bytes": 2**20,
    }
    return Forecast(**{**known, **changes})


def step_row(step: int, **changes: Any) -> StepRow:
    """Returns the row of a step of half a second."""
    known: dict[str, Any] = {
        "tokens": 1000 * step,
        "loss": 5.0 - step / 100,
        "gradient_norm": 1.5,
        "learning_rate": 1e-3,
        "step_time_s": 0.5,
        "data_wait_s": 0.01,
        "first_sample": 8 * (step - 1),
        "data_digest": f"{step:016x}",
    }
    return StepRow(step=step, **{**known, **changes})


def evaluation_row(step: int, **changes: Any) -> EvaluationRow:
    """Returns the row of an evaluation of two seconds."""
    return EvaluationRow(
        step=step, **{"loss": 4.5, "bits_per_byte": 1.25, "time_s": 2.0, **changes}
    )


def started(step: int = 0) -> EventRow:
    """Returns the row of an attempt's start."""
    return EventRow(step=step, name="started", message=f"from step {step}")
