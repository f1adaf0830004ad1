"""Predictions beside measurements: what the model of a step gets wrong, and by how much.

A prediction is a sum of terms. Where measurements of other cases are at hand, each group of terms
gets a factor: the least squares of the relative errors, drawn towards 1 as far as the cases do not
say otherwise. The interval of a corrected prediction is as wide as the errors of the other cases:
nine in ten of them were smaller.

Every case is predicted with factors and an interval that were found without it (leave one out).
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from paceline.core.errors import UsageError
from paceline.core.plan import Estimate

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
"""Those of a step of a data-parallel strategy."""

COVERAGE = 0.9
_PRIOR_SPREAD = 0.5
_ERROR_SPREAD = 0.08
_LEAST_FACTOR = 0.1
FEWEST_CASES = 10
"""The fewest cases that give factors and an interval."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BacktestCase:
    """One step that was predicted and measured."""

    labels: Mapping[str, str]
    """What tells it from others, by name."""
    terms: Mapping[str, float]
    """Seconds by term."""
    measured_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Correction:
    """What other cases teach about predictions."""

    groups: Groups
    factors: Mapping[str, float]
    """By group of terms."""
    log_error: float
    """Nine in ten of the errors, as logarithms of ratios, were smaller."""

    def apply(self, terms: Mapping[str, float]) -> Estimate:
        """Returns the corrected step time with its interval."""
        value = float(_grouped(terms, self.groups) @ np.array(list(self.factors.values())))
        width = float(np.exp(self.log_error))
        return Estimate(value=value, low=value / width, high=value * width)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldOutPrediction:
    """A case beside what was predicted of it by the others."""

    case: BacktestCase
    predicted: Estimate

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted.value / self.case.measured_s - 1

    @property
    def is_covered(self) -> bool | None:
        """Whether the interval holds what was measured; None where there is no interval."""
        low, high = self.predicted.low, self.predicted.high
        return None if low is None or high is None else low <= self.case.measured_s <= high


@dataclasses.dataclass(frozen=True, kw_only=True)
class BacktestSummary:
    """All held-out predictions in a few numbers."""

    num_cases: int
    median_error: float
    """Of the absolute relative errors."""
    ninetieth_error: float
    coverage: float | None
    """Share of cases inside of their interval; None where there are too few for one."""
    median_width: float | None
    """Half of the interval, relative to the prediction."""


def fit_correction(cases: Sequence[BacktestCase], groups: Groups = GROUPS) -> Correction:
    """Learns factors from cases, and an interval from how each is predicted by the others."""
    if len(cases) < FEWEST_CASES:
        raise UsageError(
            f"{len(cases)} measured cases are too few for an interval; measure at least "
            f"{FEWEST_CASES} besides the one that is predicted"
        )
    rows = np.stack([_grouped(case.terms, groups) / case.measured_s for case in cases])
    # One factor per group, so that rows times factors is close to 1.
    weight = (_ERROR_SPREAD / _PRIOR_SPREAD) ** 2
    matrix = rows.T @ rows + weight * np.eye(rows.shape[1])
    solved = np.linalg.solve(matrix, rows.sum(axis=0) + weight)
    factors = np.clip(solved, _LEAST_FACTOR, None)
    # Each case without itself: the leverage of a row tells how much it pulled its own prediction.
    leverage = np.einsum("ij,jk,ik->i", rows, np.linalg.inv(matrix), rows)
    residuals = (rows @ factors - 1) / (1 - leverage)
    errors = np.sort(np.abs(np.log1p(np.clip(residuals, -0.9, None))))
    # One more than the share itself: the case to come is one of them.
    rank = min(len(errors) - 1, int(np.ceil(COVERAGE * (len(errors) + 1))) - 1)
    return Correction(
        groups=groups,
        factors=dict(zip(groups, factors.tolist(), strict=True)),
        log_error=float(errors[rank]),
    )


def leave_one_out(
    cases: Sequence[BacktestCase], groups: Groups = GROUPS
) -> list[HeldOutPrediction]:
    """Predicts every case by what all others teach; with too few others, uncorrected."""
    predictions = []
    for index, case in enumerate(cases):
        predictions += predict_others([case], [*cases[:index], *cases[index + 1 :]], groups)
    return predictions


def leave_group_out(cases: Sequence[BacktestCase], label: str) -> list[HeldOutPrediction]:
    """Predicts all cases with the same label, such as a model, by what all others teach."""
    predictions = []
    for value in dict.fromkeys(case.labels[label] for case in cases):
        held_out = [case for case in cases if case.labels[label] == value]
        others = [case for case in cases if case.labels[label] != value]
        predictions += predict_others(held_out, others)
    return predictions


def predict_others(
    held_out: Sequence[BacktestCase], cases: Sequence[BacktestCase], groups: Groups = GROUPS
) -> list[HeldOutPrediction]:
    """Predicts cases that are held out by what the cases teach.

    With fewer than `FEWEST_CASES` they teach nothing: a prediction is the sum of its terms, without
    an interval.
    """
    if len(cases) < FEWEST_CASES:
        predicted = [Estimate(value=float(_grouped(case.terms, groups).sum())) for case in held_out]
    else:
        correction = fit_correction(cases, groups)
        predicted = [correction.apply(case.terms) for case in held_out]
    return [
        HeldOutPrediction(case=case, predicted=estimate)
        for case, estimate in zip(held_out, predicted, strict=True)
    ]


def summarize(held_out: Sequence[HeldOutPrediction]) -> BacktestSummary:
    """Returns error and coverage over all predictions."""
    errors = np.abs([each.error for each in held_out])
    covered = [each.is_covered for each in held_out if each.is_covered is not None]
    widths = [
        (each.predicted.high - each.predicted.low) / (2 * each.predicted.value)
        for each in held_out
        if each.predicted.low is not None and each.predicted.high is not None
    ]
    return BacktestSummary(
        num_cases=len(held_out),
        median_error=float(np.median(errors)),
        ninetieth_error=float(np.quantile(errors, 0.9)),
        coverage=float(np.mean(covered)) if covered else None,
        median_width=float(np.median(widths)) if widths else None,
    )


def _grouped(terms: Mapping[str, float], groups: Groups) -> Array:
    return np.array([sum(terms[term] for term in group) for group in groups.values()])
