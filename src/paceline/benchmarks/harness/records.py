"""Creates records of measurements and predictions on this machine."""

from collections.abc import Mapping, Sequence

from paceline.benchmarks.harness.devices import current_environment
from paceline.records import CaseValue, Metric, Record
from paceline.records.kinds import PREDICTION, PREDICTS
from paceline.records.schema import Outcome

Numbers = Mapping[str, Metric | float | Sequence[float]]
"""Metrics by name: complete, as a single number, or as samples."""


def measured(
    kind: str,
    case: Mapping[str, CaseValue],
    numbers: Numbers,
    *,
    outcome: Outcome = "ok",
    reason: str | None = None,
    warnings: Sequence[str] = (),
) -> Record:
    """Returns a record of the results of a case on this machine."""
    return Record(
        kind=kind,
        case=dict(case),
        environment=current_environment(),
        metrics={name: _metric(number) for name, number in numbers.items()},
        outcome=outcome,
        reason=reason,
        warnings=tuple(warnings),
    )


def predicted(kind: str, case: Mapping[str, CaseValue], numbers: Numbers) -> Record:
    """Returns a record of the predictions for a case of that kind."""
    return measured(PREDICTION, {PREDICTS: kind, **case}, numbers)


def _metric(number: Metric | float | Sequence[float]) -> Metric:
    if isinstance(number, Metric):
        return number
    return Metric.from_samples(number) if isinstance(number, Sequence) else Metric(value=number)
