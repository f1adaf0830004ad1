"""Compares predicted step times with measurements, and corrects predictions by the errors.

A prediction is a sum of terms. If measurements of other cases are available, each group of terms
gets a correction factor: the least-squares solution for the relative errors, regularized towards 1.
The interval of a corrected prediction covers nine in ten of the errors of the other cases.

Every case is predicted with factors and an interval fitted without it (leave-one-out). Predicted
and measured steps are records, joined by their case. `PredictionOutcome` is any prediction beside
its measurement, and `Accuracy` summarizes many of them.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.accounting.intervals import conformal_quantile
from paceline.core.errors import UsageError
from paceline.core.plan import Estimate
from paceline.core.specs import BatchShape, ModelShape
from paceline.core.strategies import StrategyName
from paceline.core.units import format_decimal
from paceline.predict.calibration import Calibration
from paceline.predict.step import StepTerms, strategy_step_terms
from paceline.records import CaseValue, Environment, Metric, Record, join_key
from paceline.records.kinds import PREDICTION, PREDICTS, find_kind
from paceline.records.links import line_rate
from paceline.records.schema import model_case_fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictionOutcome:
    """A prediction beside its measurement."""

    predicted: Estimate | None
    """The prediction; None if there was none."""
    measured: float

    @property
    def error(self) -> float | None:
        """Relative error of the prediction."""
        return None if self.predicted is None else self.predicted.value / self.measured - 1

    @property
    def is_inside(self) -> bool | None:
        """Whether the interval contains the measured value; None without an interval."""
        if self.predicted is None or self.predicted.low is None or self.predicted.high is None:
            return None
        return self.predicted.low <= self.measured <= self.predicted.high


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Errors of many predictions, and coverage of their intervals."""

    num_predicted: int
    median_error: float
    """Median of the absolute relative errors."""
    ninetieth_error: float
    largest_error: float
    num_intervals: int
    num_inside: int
    median_width: float | None
    """Median half-width of the intervals, relative to the prediction; None without intervals."""

    @property
    def coverage(self) -> float | None:
        """Fraction of measurements inside their interval; None without intervals."""
        return self.num_inside / self.num_intervals if self.num_intervals else None


def accuracy(outcomes: Sequence[PredictionOutcome]) -> Accuracy:
    """Returns the accuracy of the outcomes with a prediction, of which there is at least one."""
    errors = np.abs([each.error for each in outcomes if each.error is not None])
    inside = [each.is_inside for each in outcomes if each.is_inside is not None]
    widths = [
        (each.predicted.high - each.predicted.low) / (2 * each.predicted.value)
        for each in outcomes
        if each.predicted is not None
        and each.predicted.low is not None
        and each.predicted.high is not None
    ]
    return Accuracy(
        num_predicted=len(errors),
        median_error=float(np.median(errors)),
        ninetieth_error=float(np.quantile(errors, 0.9)),
        largest_error=float(errors.max()),
        num_intervals=len(inside),
        num_inside=sum(inside),
        median_width=float(np.median(widths)) if widths else None,
    )


Array = npt.NDArray[np.float64]

Groups = Mapping[str, tuple[str, ...]]
"""Terms that share a factor, by the name of the factor."""

GROUPS: Groups = {
    "matmul": ("matmul_s", "attention_s"),
    "elementwise": ("elementwise_s", "launch_s"),
    "update": ("bucket_copy_s", "optimizer_s"),
    "contention": ("contention_s",),
    "exposed": ("exposed_s",),
}
"""Groups for the step of a data-parallel strategy."""

_PRIOR_SPREAD = 0.5
_ERROR_SPREAD = 0.08
_LEAST_FACTOR = 0.1
FEWEST_CASES = 10
"""Minimum number of cases for factors and an interval."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BacktestCase:
    """One predicted and measured step."""

    labels: Mapping[str, str]
    """Labels that distinguish the case, by name."""
    terms: Mapping[str, float]
    """Predicted seconds by term."""
    measured_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Correction:
    """Correction factors and interval width, fitted to other cases."""

    groups: Groups
    factors: Mapping[str, float]
    """Factor of each group of terms."""
    log_error: float
    """Bound on nine in ten of the errors, as a log ratio."""

    def apply(self, terms: Mapping[str, float]) -> Estimate:
        """Returns the corrected step time with its interval."""
        value = float(_grouped(terms, self.groups) @ np.array(list(self.factors.values())))
        width = float(np.exp(self.log_error))
        return Estimate(value=value, low=value / width, high=value * width)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldOutPrediction(PredictionOutcome):
    """A case with its prediction from the other cases."""

    case: BacktestCase
    predicted: Estimate


def fit_correction(cases: Sequence[BacktestCase], groups: Groups = GROUPS) -> Correction:
    """Fits factors to cases, and an interval to their leave-one-out errors."""
    if len(cases) < FEWEST_CASES:
        raise UsageError(
            f"{len(cases)} measured cases are too few for an interval; measure at least "
            f"{FEWEST_CASES} besides the one that is predicted"
        )
    rows = np.stack([_grouped(case.terms, groups) / case.measured_s for case in cases])
    # Solve for one factor per group such that rows @ factors is close to 1.
    weight = (_ERROR_SPREAD / _PRIOR_SPREAD) ** 2
    matrix = rows.T @ rows + weight * np.eye(rows.shape[1])
    solved = np.linalg.solve(matrix, rows.sum(axis=0) + weight)
    factors = np.clip(solved, _LEAST_FACTOR, None)
    # Leave-one-out residuals: a row's leverage is its influence on its own prediction.
    leverage = np.einsum("ij,jk,ik->i", rows, np.linalg.inv(matrix), rows)
    residuals = (rows @ factors - 1) / (1 - leverage)
    errors = np.abs(np.log1p(np.clip(residuals, -0.9, None)))
    return Correction(
        groups=groups,
        factors=dict(zip(groups, factors.tolist(), strict=True)),
        log_error=conformal_quantile(errors),
    )


def leave_one_out(
    cases: Sequence[BacktestCase], groups: Groups = GROUPS
) -> list[HeldOutPrediction]:
    """Predicts every case from all others; uncorrected if there are too few others."""
    predictions = []
    for index, case in enumerate(cases):
        predictions += predict_others([case], [*cases[:index], *cases[index + 1 :]], groups)
    return predictions


def leave_group_out(cases: Sequence[BacktestCase], label: str) -> list[HeldOutPrediction]:
    """Predicts the cases of each label value, such as each model, from all other cases."""
    predictions = []
    for value in dict.fromkeys(case.labels[label] for case in cases):
        held_out = [case for case in cases if case.labels[label] == value]
        others = [case for case in cases if case.labels[label] != value]
        predictions += predict_others(held_out, others)
    return predictions


def predict_others(
    held_out: Sequence[BacktestCase], cases: Sequence[BacktestCase], groups: Groups = GROUPS
) -> list[HeldOutPrediction]:
    """Predicts held-out cases with a correction fitted to `cases`.

    With fewer than `FEWEST_CASES` cases there is no correction: each prediction is the sum of its
    terms, without an interval.
    """
    if len(cases) < FEWEST_CASES:
        predicted = [Estimate(value=float(_grouped(case.terms, groups).sum())) for case in held_out]
    else:
        correction = fit_correction(cases, groups)
        predicted = [correction.apply(case.terms) for case in held_out]
    return [
        HeldOutPrediction(case=case, predicted=estimate, measured=case.measured_s)
        for case, estimate in zip(held_out, predicted, strict=True)
    ]


def _grouped(terms: Mapping[str, float], groups: Groups) -> Array:
    return np.array([sum(terms[term] for term in group) for group in groups.values()])


STEP = "step_time_s"
_MEASURED = "ddp"
_ByKey: TypeAlias = dict[tuple[CaseValue, ...], Record]
_TERMS = tuple(field.name for field in dataclasses.fields(StepTerms))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictedCase:
    """A step to predict."""

    model: str
    shape: ModelShape
    batch: BatchShape
    strategy: StrategyName
    bucket_size_mb: float | None
    """Bucket size in MiB; None for the strategy's default, or if it has no buckets."""


def predict_step(
    case: PredictedCase,
    calibration: Calibration,
    environment: Environment,
    correction: Correction | None = None,
) -> Record:
    """Returns a record of the predicted step time and its terms, with an interval if corrected."""
    terms = strategy_step_terms(
        case.shape, case.batch, case.strategy, calibration, case.bucket_size_mb
    )
    step_time = Metric(value=terms.total_s)
    seconds = dataclasses.asdict(terms)
    if correction is not None:
        step_time = Metric.from_estimate(correction.apply(seconds))
    topology = {field: value for field, value in calibration.topology.items() if value is not None}
    return Record(
        kind=PREDICTION,
        case={
            PREDICTS: _MEASURED,
            "strategy": case.strategy,
            "bucket_size_mb": case.bucket_size_mb,
            **model_case_fields(case.model, case.shape, case.batch),
            "precision": "float32",
            "float32_matmul_precision": calibration.float32_matmul_precision,
            "compile": "none",
            "activation_checkpointing": "none",
            "attention": calibration.attention_implementation,
            "optimizer": "adamw-fused",
            **topology,
        },
        environment=environment,
        metrics={STEP: step_time, **{name: Metric(value=value) for name, value in seconds.items()}},
        outcome="ok",
    )


def backtest_cases(records: Iterable[Record]) -> list[BacktestCase]:
    """Joins predicted steps with their measurements, using the last record of each key."""
    predicted: _ByKey = {}
    measured: _ByKey = {}
    for record in records:
        if record.outcome != "ok" or record.measured_kind.name != _MEASURED:
            continue
        if record.kind != PREDICTION:
            measured[join_key(record)] = record
        elif all(term in record.metrics for term in _TERMS):
            predicted[join_key(record)] = record
    joined = [key for key in predicted if key in measured]
    if not joined:
        raise UsageError(
            f"none of {len(predicted)} predicted steps was measured, and none of {len(measured)} "
            f"measured steps was predicted{_first_difference(predicted, measured)}; run paceline "
            "plan step and paceline bench ddp with the same model, batch, strategies and ranks"
        )
    return [
        BacktestCase(
            labels=_labels(measured[key]),
            terms={term: predicted[key].metrics[term].value for term in _TERMS},
            measured_s=measured[key].metrics[STEP].value,
        )
        for key in joined
    ]


def _first_difference(predicted: _ByKey, measured: _ByKey) -> str:
    """Returns a message with the fields in which the first prediction misses its nearest match."""
    if not predicted or not measured:
        return ""
    prediction = next(iter(predicted.values())).case
    fields = find_kind(_MEASURED).join_key
    differences = [
        ", ".join(field for field in fields if prediction.get(field) != record.case.get(field))
        for record in measured.values()
    ]
    return f" (the nearest differ in {min(differences, key=len) or 'their links'})"


def _labels(record: Record) -> dict[str, str]:
    rate = line_rate(record.case)
    link = "loopback" if rate is None else format_decimal(rate, "bit/s")
    return {
        **{field: str(record.case[field]) for field in ("model", "batch", "context", "strategy")},
        "ranks": str(record.case["world_size"]),
        "link": link,
    }
