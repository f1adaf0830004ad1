"""The record: one measured or predicted case.

A metric's unit is in its name (`step_time_s`, `peak_bytes`). Its `value` is the median of its
samples or the point estimate of a prediction. It is always finite: a run that diverges is an
outcome, not a number. A record is either ok or states the reason why not. Its warnings name
reasons to doubt a measured number.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from paceline.core.errors import RecordError
from paceline.core.plan import Estimate
from paceline.core.specs import BatchShape, ModelShape
from paceline.records.environment import Environment
from paceline.records.kinds import COMPRESSION, LINK_SHAPE, PREDICTION, PREDICTS, Kind, find_kind

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
    """Smallest sample."""
    low: float | None = None
    """Lower end of the interval, if there is one."""
    high: float | None = None
    """Upper end of the interval, if there is one."""
    samples: tuple[float, ...] = ()
    """All samples, in the order in which they were taken."""

    def __post_init__(self) -> None:
        summary = (self.value, self.mean, self.std, self.min, self.low, self.high)
        _require_finite([number for number in summary if number is not None])
        _require_finite(self.samples)

    @classmethod
    def from_samples(cls, samples: Sequence[float]) -> "Metric":
        """Summarises samples: the median as the value, with mean, deviation and minimum."""
        if not samples:
            raise RecordError("a metric needs at least one sample")
        # Checked first, because `statistics` fails on NaN with an unhelpful message.
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
        """Converts an `estimate`, for example from a plan, to a metric with the same interval."""
        return cls(value=estimate.value, low=estimate.low, high=estimate.high)


def with_interval(number: Metric | Estimate, write: Callable[[float], str]) -> str:
    """Formats a number, with its interval if it has one."""
    if number.low is None or number.high is None:
        return write(number.value)
    return f"{write(number.value)} ({write(number.low)} to {write(number.high)})"


def interval_ends(number: Metric | Estimate) -> tuple[float, float]:
    """Returns both ends of a number's interval; an end that is unknown is the number itself."""
    low, high = (number.value if end is None else end for end in (number.low, number.high))
    return low, high


def _require_finite(numbers: Sequence[float]) -> None:
    if not all(map(math.isfinite, numbers)):
        raise RecordError(f"a metric must be finite, got {list(numbers)}")


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One case with its environment and its results."""

    schema: Literal[1] = 1
    """Version of this format."""
    kind: str
    """Kind of measurement: see `find_kind`."""
    case: dict[str, CaseValue]
    """Everything that changes the expected value, by name."""
    environment: Environment
    """Machine and software of the measurement."""
    metrics: dict[str, Metric]
    """Results, by names that end in their units."""
    outcome: Outcome
    """ok, or the type of failure."""
    reason: str | None = None
    """Explanation of every outcome but ok."""
    warnings: tuple[str, ...] = ()
    """Reasons to doubt the metrics."""

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
        """The kind of this measurement, or of the measurement that this prediction is for."""
        if self.kind != PREDICTION:
            return find_kind(self.kind)
        return find_kind(str(self.case.get(PREDICTS)))


def join_key(record: Record) -> tuple[CaseValue, ...]:
    """Returns the key of a `record` that a prediction shares with its measurement."""
    kind = record.measured_kind
    fields = (*kind.join_key, *LINK_SHAPE, COMPRESSION)
    return (kind.name, *(record.case.get(field) for field in fields))


_MODEL_SIZES = ("vocab_size", "d_model", "d_ff", "num_layers", "num_heads")
_OPTIONAL_SIZES = ("num_kv_heads", "head_dim")


def missing_model_fields(case: Mapping[str, object]) -> list[str]:
    """Returns the dimensions of a model that a case lacks, or that are not whole numbers."""
    missing = [field for field in _MODEL_SIZES if not isinstance(case.get(field), int)]
    return missing + [
        field for field in _OPTIONAL_SIZES if not isinstance(case.get(field), int | None)
    ]


def model_of_case(case: Mapping[str, object]) -> ModelShape | None:
    """Returns the model that `model_case_fields` described; None if the case lacks its fields."""
    if missing_model_fields(case):
        return None
    sizes: dict[str, Any] = {field: case.get(field) for field in (*_MODEL_SIZES, *_OPTIONAL_SIZES)}
    return ModelShape(**sizes, tied_embeddings=case.get("tied_embeddings") is True)


def model_case_fields(name: str, shape: ModelShape, batch: BatchShape) -> dict[str, CaseValue]:
    """Returns the case fields that describe a model and the batch of one rank."""
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
