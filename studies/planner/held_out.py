"""Held-out predictions of published runs, with intervals, by source.

Each row of a pool is predicted by a fit to the other models. Its interval comes from the residuals
of the other models in the pool or, for a pool that is drawn from what frameworks share, from the
errors on other pools, with the ranges and widening of `FrameworkCalibration.interval`. A row is
covered if its measured time lies inside the interval.
"""

import dataclasses
from collections.abc import Sequence

import msgspec
import numpy as np

from paceline.planner.calibrations.calibration import FrameworkCalibration, ranges
from paceline.planner.calibrations.cases import Array, Case, group_cases
from paceline.planner.calibrations.fit import (
    calibrations_of,
    fit_cases,
    held_out_by,
    predict_held_out,
    residuals_of,
)
from paceline.planner.calibrations.parameters import terms_of
from paceline.planner.calibrations.pooled import drawn_calibrations
from paceline.planner.calibrations.prior import PooledPrior
from paceline.planner.calibrations.relatives import fit_with_relatives

_SOURCES = {
    "vtrain": "vTrain, 64 to 512 A100",
    "vtrain-host": "vTrain, one host of A100",
    "bloom": "BLOOM, A100",
    "internevo": "InternEvo, A100",
    "torchtitan": "torchtitan, H100 and H200",
    "megatron-bridge": "Megatron-Bridge, dense models",
    "nemo-h100-sxm-bfloat16": "NeMo, H100 BF16",
    "nemo-h100-sxm-float8": "NeMo, H100 FP8",
    "nemo-blackwell": "NeMo, B200 and GB200",
    "llm-foundry-a100-sxm-40gb": "llm-foundry, A100 40 GB",
    "llm-foundry-a100-sxm-80gb": "llm-foundry, A100 80 GB",
    "llm-foundry-h100-sxm": "llm-foundry, H100",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolResult:
    """Held-out predictions of one pool."""

    pool: str
    cases: tuple[Case, ...]
    predicted: Array
    """Predicted seconds of each row with its model held out."""
    low: Array
    """Lower bounds of the intervals, in seconds."""
    high: Array
    calibrations: tuple[FrameworkCalibration, ...]

    @property
    def source(self) -> str:
        """Display name of the pool."""
        return _SOURCES.get(self.pool, "others")

    @property
    def measured(self) -> Array:
        """Published seconds per step."""
        return np.array([case.step_s for case in self.cases])


def validate_pool(cases: Sequence[Case], *, without: str | None = None) -> PoolResult:
    """Fits a pool by itself and predicts each model held out. `without` names a term to omit."""
    terms = tuple(term for term in terms_of(cases[0].pool) if term != without)
    fit = fit_cases(cases, terms=terms)
    predicted = predict_held_out(cases, terms=terms)
    return _result(cases, predicted, calibrations_of(cases, fit, predicted))


def validate_drawn_pool(
    cases: Sequence[Case], relatives: Sequence[Case], prior: PooledPrior
) -> PoolResult:
    """Draws the prior to a pool and its relatives, and predicts each model without its rows."""
    folds = held_out_by(cases)
    predicted = np.full(len(cases), np.nan)
    for fold in sorted(set(folds)):
        index = [number for number, its in enumerate(folds) if its == fold]
        tested = [cases[number] for number in index]
        others = [case for case, its in zip(cases, folds, strict=True) if its != fold]
        if others:
            predicted[index] = predict_drawn(prior, others, relatives, tested)
    made = drawn_calibrations(
        cases, relatives, prior=prior, residuals=residuals_of(cases, predicted)
    )
    return _result(cases, predicted, made)


def predict_drawn(
    prior: PooledPrior, rows: Sequence[Case], relatives: Sequence[Case], tested: Sequence[Case]
) -> Array:
    """Returns the seconds of runs, from other rows and relatives' runs of other models."""
    models = {case.run.model for case in tested}
    beside = [case for case in relatives if case.run.model not in models]
    posterior = fit_with_relatives(prior, rows, beside, also=[case.variant for case in tested])
    return np.exp(posterior.predict(tested)[0])


def _result(
    cases: Sequence[Case], predicted: Array, made: Sequence[FrameworkCalibration]
) -> PoolResult:
    low, high = _intervals(cases, predicted, made)
    return PoolResult(
        pool=cases[0].pool,
        cases=tuple(cases),
        predicted=predicted,
        low=low,
        high=high,
        calibrations=tuple(made),
    )


def _intervals(
    cases: Sequence[Case], predicted: Array, made: Sequence[FrameworkCalibration]
) -> tuple[Array, Array]:
    """Returns the bounds of every interval, from residuals and ranges of the other folds."""
    low, high = np.full(len(cases), np.nan), np.full(len(cases), np.nan)
    folds = np.array(held_out_by(cases))
    by_variant = {(each.device, each.precision): each for each in made}
    for fold in np.unique(folds):
        inside = [case for case, its in zip(cases, folds, strict=True) if its == fold]
        others = [case for case, its in zip(cases, folds, strict=True) if its != fold]
        index = np.flatnonzero(folds == fold)
        rows = {case.run.id for case in others}
        if not others:
            continue
        for group in group_cases(inside):
            variant = (group.variant.device, group.variant.dtype)
            alike = [case for case in others if case.variant[:2] == variant] or others
            calibration = by_variant.get(variant, made[0])
            if calibration.half_width_elsewhere is None:
                calibration = msgspec.structs.replace(
                    calibration,
                    residuals=tuple(
                        each
                        for its in _first(by_variant, variant, made)
                        for each in its.residuals
                        if each.row in rows
                    ),
                    seen=ranges([(each.layouts, each.workload) for each in group_cases(alike)]),
                )
            factors = calibration.interval(group.layouts, group.workload)
            place = index[group.index]
            low[place] = predicted[place] * factors[0]
            high[place] = predicted[place] * factors[1]
    return low, high


def _first(
    by_variant: dict[tuple[str, str], FrameworkCalibration],
    variant: tuple[str, str],
    made: Sequence[FrameworkCalibration],
) -> Sequence[FrameworkCalibration]:
    """Returns the calibration of a device and dtype, or all calibrations if it has none."""
    return [by_variant[variant]] if variant in by_variant else made
