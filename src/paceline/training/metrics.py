"""Metrics rows of a run, one per step, evaluation and event; their file, and their summary."""

import dataclasses
import math
import os
import statistics
from collections.abc import Iterable, Sequence

import msgspec

from paceline.records import Metric
from paceline.records.store import RowFile
from paceline.training.forecast import Forecast


class StepRow(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="step", tag_field="kind"
):
    """Metrics of one training step."""

    step: int
    """Number of completed steps, including this one."""
    tokens: int
    """Tokens that the run has trained on so far."""
    loss: float
    gradient_norm: float
    learning_rate: float
    step_time_s: float
    """Time on the first rank, from the end of the previous step to the end of this one."""
    data_wait_s: float
    """Part of the step time spent waiting for the batch."""
    first_sample: int
    """Position of the batch's first sample in the stream of samples."""
    data_digest: str
    """Digest of the batch's samples, for audits of what was trained on."""
    exposed_communication_s: float | None = None
    """Part of the step time spent waiting for other ranks' gradients; sampled every few steps."""
    memory_bytes: int | None = None
    """Resident memory of the first rank, or the peak of its GPU's tensors; sampled every few
    steps."""


class EvaluationRow(msgspec.Struct, frozen=True, kw_only=True, tag="evaluation", tag_field="kind"):
    """Evaluation of the model on held-out text."""

    step: int
    loss: float
    bits_per_byte: float
    sample: str | None = None
    """The model's continuation of the prompt."""
    time_s: float | None = None
    """How long training paused for it."""


class EventRow(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="event", tag_field="kind"
):
    """A single event, such as started, saved or stopped."""

    step: int
    name: str
    message: str
    time_s: float | None = None
    """How long training paused for it."""
    details: dict[str, float | int | str] | None = None
    """Additional values by name."""


STARTED = "started"
"""Event at the start of every attempt of a run, and after every rollback."""
RESTARTED = "restarted"
"""Event of ranks that were restarted after a failure."""
SAVED = "saved"
"""Event of a saved checkpoint."""
CHECKPOINT = "checkpoint"
"""Event of a state that was restored from memory or disk, or could not be kept in memory."""
REPLICAS = "replicas"
"""Event of replicas that join or leave, or of a step that they repeat."""
EXCHANGED = "exchanged"
"""Event of a part of the parameters that several sites have averaged."""
FINISHED = "finished"
"""Event after the last step."""
CORRUPTED = "corrupted"
"""Event of silently corrupted weights or optimizer state."""
SKIPPED = "skipped"
"""Event of samples that the run skips because of the loss that they led to."""
FIRST_SAMPLE, NUM_SAMPLES = "first_sample", "num_samples"
"""Keys in the details of a SKIPPED event: position of the first sample, number of samples."""
LOST = "lost"
"""Event of a rank that does not respond, or is behind when a step hangs."""
INCIDENTS = (CORRUPTED, LOST)
"""Events that are kept when a run goes back to an earlier step."""

MetricsRow = StepRow | EvaluationRow | EventRow


class MetricsFile(RowFile[MetricsRow]):
    """Metrics file of a run."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, MetricsRow, "a row of a run")


_LAST_STEPS = 20
"""Number of steps whose mean loss is the final loss."""
_MOST_SAMPLES = 200


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseTimes:
    """Breakdown of a run's time in seconds, without time lost to kills."""

    compute_s: float
    """Forward, backward and optimizer, including the communication that they hide."""
    exposed_communication_s: float
    """Extrapolated from the sampled steps."""
    data_wait_s: float
    evaluation_s: float
    checkpoint_s: float
    """How long training paused to start checkpoints."""

    @property
    def total_s(self) -> float:
        """Sum of all phases."""
        return math.fsum(dataclasses.astuple(self))


def steps_of(rows: Iterable[MetricsRow]) -> list[StepRow]:
    """Returns the step rows."""
    return [row for row in rows if isinstance(row, StepRow)]


def steady_steps(rows: Iterable[MetricsRow]) -> list[StepRow]:
    """Returns the steps with a representative step time.

    Excludes the first step of an attempt, which warms up, and the step after an evaluation or an
    event such as a checkpoint, whose time includes that.
    """
    steady, is_disturbed = [], True
    for row in rows:
        if isinstance(row, StepRow):
            if not is_disturbed:
                steady.append(row)
            is_disturbed = False
        else:
            is_disturbed = True
    return steady


def run_metrics(rows: Sequence[MetricsRow], expected: Forecast) -> dict[str, Metric]:
    """Returns the metrics of a run's record; empty before its first step."""
    steps = steps_of(rows)
    if not steps:
        return {}
    times = [row.step_time_s for row in steady_steps(rows) or steps]
    step_time = Metric.from_samples(evenly(times, _MOST_SAMPLES))
    metrics = {
        "loss": Metric(value=statistics.fmean(row.loss for row in steps[-_LAST_STEPS:])),
        "tokens": Metric(value=steps[-1].tokens),
        "step_time_s": step_time,
        "tokens_per_s": Metric(value=expected.tokens_per_s(step_time.value)),
    }
    evaluations = [row for row in rows if isinstance(row, EvaluationRow)]
    if evaluations:
        metrics["heldout_loss"] = Metric(value=evaluations[-1].loss)
        metrics["bits_per_byte"] = Metric(value=evaluations[-1].bits_per_byte)
    if expected.final_loss is not None:
        metrics["predicted_final_loss"] = Metric(value=expected.final_loss.value)
    if expected.step_time is not None:
        metrics["predicted_step_time_s"] = Metric.from_estimate(expected.step_time)
    if (utilization := expected.utilization(step_time.value)) is not None:
        metrics["model_flops_utilization"] = Metric(value=utilization)
    exposed = _exposed_s(steps)
    if exposed:
        samples = evenly(exposed, _MOST_SAMPLES)
        metrics["exposed_communication_s"] = Metric.from_samples(samples)
    if skipped := [row for row in rows if isinstance(row, EventRow) and row.name == SKIPPED]:
        metrics["num_skipped"] = Metric(value=len(skipped))
        metrics["skipped_samples"] = Metric(
            value=sum(int((row.details or {})[NUM_SAMPLES]) for row in skipped)
        )
    memory = [row.memory_bytes for row in steps if row.memory_bytes is not None]
    if memory:
        metrics["memory_bytes"] = Metric(value=max(memory))
        if expected.process_memory is not None:
            metrics["predicted_memory_bytes"] = Metric.from_estimate(expected.process_memory)
        elif expected.memory_bytes is not None:
            metrics["predicted_memory_bytes"] = Metric(value=expected.memory_bytes)
    return metrics


def phase_times(rows: Sequence[MetricsRow]) -> PhaseTimes:
    """Returns the time breakdown of all steps, evaluations and checkpoints."""
    steps = steps_of(rows)
    step_s = sum(row.step_time_s for row in steps)
    data_wait_s = sum(row.data_wait_s for row in steps)
    exposed = _exposed_s(steps)
    exposed_s = statistics.fmean(exposed) * len(steps) if exposed else 0.0
    # A step's time starts at the end of the previous step, so it includes what happened between
    # them. No step includes what happened after the last step of an attempt.
    evaluation_s = checkpoint_s = between_s = pending_s = 0.0
    for row in rows:
        if isinstance(row, StepRow):
            between_s, pending_s = between_s + pending_s, 0.0
        elif isinstance(row, EvaluationRow):
            evaluation_s += row.time_s or 0.0
            pending_s += row.time_s or 0.0
        elif row.name == SAVED:
            checkpoint_s += row.time_s or 0.0
            pending_s += row.time_s or 0.0
        elif row.name == STARTED:
            pending_s = 0.0
    return PhaseTimes(
        compute_s=max(0.0, step_s - data_wait_s - exposed_s - between_s),
        exposed_communication_s=exposed_s,
        data_wait_s=data_wait_s,
        evaluation_s=evaluation_s,
        checkpoint_s=checkpoint_s,
    )


def _exposed_s(steps: Iterable[StepRow]) -> list[float]:
    """Returns the exposed communication of the sampled steps."""
    waits = (row.exposed_communication_s for row in steps)
    return [wait_s for wait_s in waits if wait_s is not None]


def evenly(values: Sequence[float], most: int) -> list[float]:
    """Returns at most `most` of the values, evenly spaced."""
    if len(values) <= most:
        return list(values)
    return [values[index * len(values) // most] for index in range(most)]
