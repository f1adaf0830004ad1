"""The record: one measured or predicted case.

A metric's unit is in its name (`step_time_s`, `peak_bytes`), its `value` is the median of
its samples or the point estimate of a prediction, and it is always finite: a run that went
to infinity is an outcome, not a number. A record either is ok or says why not; its warnings
name what makes a number that was measured hard to believe.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Literal

import msgspec

from paceline.core.errors import RecordError
from paceline.core.plan import Estimate
from paceline.core.specs import BatchShape, ModelShape
from paceline.records.environment import Environment
from paceline.records.kinds import LINK_SHAPE, PREDICTION, PREDICTS, Kind, find_kind

CaseValue = str | int | float | bool | None
Outcome = Literal["ok", "out_of_memory", "skipped", "failed", "timeout", "diverged"]


class Metric(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One number with its spread."""

    value: float
    """The median of the samples, or the point estimate of a prediction."""
    mean: float | None = None
    """Mean of the samples."""
    std: float | None = None
    """Standard deviation of the samples."""
    min: float | None = None
    """The smallest sample."""
    low: float | None = None
    """Lower end of the interval, if there is one."""
    high: float | None = None
    """Upper end of the interval, if there is one."""
    samples: tuple[float, ...] = ()
    """Every sample, in the order in which they were taken."""

    def __post_init__(self) -> None:
        summary = (self.value, self.mean, self.std, self.min, self.low, self.high)
        _require_finite([number for number in summary if number is not None])
        _require_finite(self.samples)

    @classmethod
    def from_samples(cls, samples: Sequence[float]) -> "Metric":
        """Summarises samples: median as the value, with mean, deviation and minimum."""
        if not samples:
            raise RecordError("a metric needs at least one sample")
        # Before `statistics` sees them, which fails on NaN in its own words.
        _require_finite(samples)
        return cls(
            value=statistics.median(samples),
            mean=statistics.fmean(samples),
            std=statistics.stdev(samples) if len(samples) > 1 else None,
            min=min(samples),
            samples=tuple(samples),
        )

    @classmethod
    def from_estimate(cls, estimate: Estimate) -> "Metric":
        """Turns an `estimate`, such as a plan has, into a metric with the same interval."""
        return cls(value=estimate.value, low=estimate.low, high=estimate.high)


def _require_finite(numbers: Sequence[float]) -> None:
    if not all(map(math.isfinite, numbers)):
        raise RecordError(f"a metric must be finite, got {list(numbers)}")


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One case, where it ran, and what came out of it."""

    schema: Literal[1] = 1
    """Version of this format."""
    kind: str
    """What was measured: see `find_kind`."""
    case: dict[str, CaseValue]
    """Everything that changes the expected value, by name."""
    environment: Environment
    """Where and with what it was made."""
    metrics: dict[str, Metric]
    """What came out, by names that end in their units."""
    outcome: Outcome
    """ok, or why there is nothing to see."""
    reason: str | None = None
    """In words, for every outcome but ok."""
    warnings: tuple[str, ...] = ()
    """What makes a number hard to believe."""

    def __post_init__(self) -> None:
        kind = self.measured_kind
        allowed = {*kind.case_fields, PREDICTS} if self.kind == PREDICTION else kind.case_fields
        for field in self.case:
            if field not in allowed:
                raise RecordError(f"case.{field}: not a field of kind {self.kind!r}")
        for field in kind.join_key:
            if field not in self.case:
                raise RecordError(f"case.{field}: missing, kind {self.kind!r} requires it")
        if (self.outcome == "ok") != (self.reason is None):
            raise RecordError(
                f"reason: outcome {self.outcome!r} {'has none' if self.reason else 'needs one'}"
            )

    @property
    def measured_kind(self) -> Kind:
        """The kind of this measurement, or of the one that this prediction predicts."""
        if self.kind != PREDICTION:
            return find_kind(self.kind)
        return find_kind(str(self.case.get(PREDICTS)))


def join_key(record: Record) -> tuple[CaseValue, ...]:
    """Returns what a `record` of a prediction and that of its measurement have in common."""
    kind = record.measured_kind
    fields = (*kind.join_key, *LINK_SHAPE)
    return (kind.name, *(record.case.get(field) for field in fields))


def model_case_fields(name: str, shape: ModelShape, batch: BatchShape) -> dict[str, CaseValue]:
    """Returns what a case says of the model and the batch of one rank."""
    return {
        "model": name,
        "vocab_size": shape.vocab_size,
        "d_model": shape.d_model,
        "d_ff": shape.d_ff,
        "num_layers": shape.num_layers,
        "num_heads": shape.num_heads,
        "num_kv_heads": shape.key_value_heads,
        "head_dim": shape.head_width,
        "tied_embeddings": shape.tied_embeddings,
        "batch": batch.num_sequences,
        "context": batch.context_length,
    }
