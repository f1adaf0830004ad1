"""Fits a framework's step-time constants to measured steps, and builds its calibrations.

The fit minimizes the log ratio of predicted to measured seconds with scipy's least squares. The
loss grows linearly for errors beyond the noise, and every constant has a prior. All devices and
dtypes of a framework are fitted together. They share every constant except the matmul rate, which
has an offset per (device, dtype) in addition to the shared value; each gets a calibration.

A model is held out by fitting the rows of all other models. If a framework has only one model, one
device count is held out instead.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from paceline.core.errors import UsageError
from paceline.planner.calibrations.calibration import FrameworkCalibration, Residual, ranges
from paceline.planner.calibrations.cases import Array, Case, CaseGroup, Variant, group_cases
from paceline.planner.calibrations.parameters import PRIORS, USUAL_TERMS, require_device, terms_of
from paceline.planner.calibrations.predictor import (
    Effect,
    Predictor,
    cluster_of_group,
    constant_names,
    with_effects,
)
from paceline.predict.cost.cluster import MeasuredCorrections, cell_of
from paceline.predict.cost.step_time import step_time

NOISE = 0.03
"""Assumed spread of repeated measurements of one framework, in log seconds."""
VARIANT_DEVIATION = 0.3
"""Prior standard deviation of a variant's log offset from the framework's matmul share."""
_SLOW_LATENCY_S = 5e-3
_EVALUATIONS = 36


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gaussian:
    """What is known of a point before its rows: independent normal coordinates with a limit."""

    mean: Array
    deviation: Array
    most: Array

    @classmethod
    def of_constants(
        cls, constants: Sequence[str], effect_deviations: Sequence[float], scale: float = 1.0
    ) -> "Gaussian":
        """Returns the priors of constants, their deviations times `scale`, and of effects."""
        priors = [PRIORS[name] for name in constants]
        none = len(effect_deviations)
        return cls(
            mean=np.array([*(np.log(prior.mean) for prior in priors), *([0.0] * none)]),
            deviation=np.array(
                [*(scale * prior.deviation for prior in priors), *effect_deviations]
            ),
            most=np.array([*(np.log(prior.most) for prior in priors), *([np.inf] * none)]),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MostProbable:
    """The most probable point after the rows, and how sharply they determine it."""

    point: Array
    information: npt.NDArray[np.float64]
    """Second derivatives of the rows' share of the loss; the prior's are not in it."""
    gradient: Array
    """First derivatives of the rows' share of the loss."""


def find_constants(
    predictor: Predictor,
    prior: Gaussian,
    *,
    noise: float = NOISE,
    weights: Array | None = None,
    evaluations: int = _EVALUATIONS,
    from_slow_links: bool = True,
) -> MostProbable:
    """Returns the most probable point given the measured seconds of a predictor's cases.

    Args:
        predictor: Predicts the cases.
        prior: What is known of the point.
        noise: Spread of repeated measurements, in log seconds.
        weights: Counts a row as so many rows; 1 each by default.
        evaluations: Largest number of points to try.
        from_slow_links: Whether to search a second time, from links of high latency. A few rows
            cannot tell these from other causes.
    """
    from scipy.optimize import least_squares

    roots: Array = np.ones(len(predictor.measured)) if weights is None else np.sqrt(weights)
    lower = prior.mean - 5 * prior.deviation
    upper = np.maximum(np.minimum(prior.mean + 5 * prior.deviation, prior.most), lower + 1e-6)

    def of_rows(predicted: Array) -> Array:
        misfit = (predicted - predictor.measured) / noise
        # Grows with the square root of the misfit, so that its square grows linearly.
        robust: Array = np.sign(misfit) * np.sqrt(2 * (np.sqrt(1 + misfit**2) - 1))
        return roots * robust

    def residuals(point: Array) -> Array:
        return np.concatenate(
            [of_rows(predictor(point)[0]), (point - prior.mean) / prior.deviation]
        )

    def slopes(point: Array) -> npt.NDArray[np.float64]:
        predicted, derivatives = predictor.slopes(point)
        misfit = (predicted - predictor.measured) / noise
        root = np.sqrt(1 + misfit**2)
        # The derivative of sign(m) sqrt(2 (root - 1)), whose limit at 0 is 1.
        steepness = np.sqrt((root + 1) / 2) / root
        own = (roots * steepness / noise)[:, np.newaxis] * derivatives
        return np.vstack([own, np.diag(1 / prior.deviation)])

    starts = [prior.mean]
    if from_slow_links and "outer_latency_s" in predictor.constants:
        # Rings over many hosts can be latency-bound. The gradient at the prior mean does not show
        # that, so a second start begins at a high latency.
        slow = prior.mean.copy()
        slow[predictor.constants.index("outer_latency_s")] = np.log(_SLOW_LATENCY_S)
        starts.append(slow)
    found = [
        least_squares(
            residuals,
            np.clip(start, lower + 1e-9, upper - 1e-9),
            jac=slopes,
            bounds=(lower, upper),
            x_scale=prior.deviation,
            ftol=1e-5,
            xtol=1e-5,
            max_nfev=evaluations,
        )
        for start in starts
    ]
    best = min(found, key=lambda each: each.cost)
    number = len(predictor.measured)
    return MostProbable(
        point=best.x,
        information=best.jac[:number].T @ best.jac[:number],
        gradient=best.jac[:number].T @ best.fun[:number],
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """Fitted constants of one framework."""

    values: Mapping[str, float]
    offsets: Mapping[Effect, float]
    """Log ratio of a variant's matmul share to the shared one."""
    cells: MeasuredCorrections | None = None

    def constants(self, variant: Variant) -> dict[str, float]:
        """Returns the constants of one variant."""
        values = with_effects(self.values, self.offsets, _offset_of(variant))
        return {name: float(value) for name, value in values.items()}


def predict_groups(groups: Sequence[CaseGroup], fit: Fit, size: int) -> Array:
    """Returns the predicted seconds of every case, in the order before grouping."""
    seconds = np.empty(size)
    for group in groups:
        constants = fit.constants(group.variant)
        cluster = cluster_of_group(constants, group, fit.cells)
        steps = step_time(group.layouts, group.workload, cluster, hidden=constants["hidden"])
        seconds[group.index] = steps.total_s
    return seconds


def fit_cases(cases: Sequence[Case], *, terms: Sequence[str] = USUAL_TERMS) -> Fit:
    """Fits the constants of the given terms to cases of one framework."""
    cases = list(cases)
    groups = group_cases(cases)
    names = constant_names(terms, cases)
    variants = sorted({case.variant for case in cases})
    # A single variant needs no offset.
    offsets = [_offset_of(variant)[0] for variant in variants] if len(variants) > 1 else []
    predictor = Predictor(cases, names, lambda group: _offset_of(group.variant), offsets)
    prior = Gaussian.of_constants(names, [VARIANT_DEVIATION] * len(offsets))
    point = find_constants(predictor, prior).point.tolist()
    fit = Fit(
        values=dict(zip(names, np.exp(point[: len(names)]).tolist(), strict=True)),
        offsets=dict(zip(offsets, point[len(names) :], strict=True)),
    )
    if "cells" not in terms:
        return fit
    ratios = predictor.measured - np.log(predict_groups(groups, fit, len(cases)))
    cells = np.empty(len(cases), dtype=np.int64)
    for group in groups:
        tokens = group.workload.tokens / group.layouts.context
        width = group.workload.shape.d_model
        cells[group.index] = cell_of(tokens, width, group.layouts.tensor)
    return dataclasses.replace(fit, cells=MeasuredCorrections.of(cells, ratios))


def _offset_of(variant: Variant) -> tuple[Effect, ...]:
    return (Effect("matmul_share", "variant", " ".join(variant)),)


def held_out_by(cases: Sequence[Case]) -> list[str]:
    """Returns the name of each case's held-out fold."""
    if len({case.run.model for case in cases}) > 1:
        return [case.run.model for case in cases]
    return [f"{case.run.devices} devices" for case in cases]


def predict_held_out(cases: Sequence[Case], *, terms: Sequence[str] = USUAL_TERMS) -> Array:
    """Returns each case's predicted seconds from a fit without its fold; NaN if only one fold."""
    folds = held_out_by(cases)
    predicted = np.full(len(cases), np.nan)
    for fold in sorted(set(folds)):
        train = [case for case, its in zip(cases, folds, strict=True) if its != fold]
        index = [number for number, its in enumerate(folds) if its == fold]
        if train:
            without = fit_cases(train, terms=terms)
            test = [cases[number] for number in index]
            predicted[index] = predict_groups(group_cases(test), without, len(test))
    return predicted


def build_calibrations(
    cases: Sequence[Case], *, name: str | None = None
) -> list[FrameworkCalibration]:
    """Fits the rows of one pool and returns one calibration per device and dtype."""
    if not cases:
        raise UsageError("no row can be predicted: give model, devices, batch, layout and time")
    terms = terms_of(cases[0].pool)
    fit = fit_cases(cases, terms=terms)
    return calibrations_of(cases, fit, predict_held_out(cases, terms=terms), name=name)


def residuals_of(cases: Sequence[Case], held_out: Array) -> list[Residual]:
    """Returns the residuals of cases that were predicted from others, in seconds; NaN if not."""
    ratios = np.log(np.array([case.step_s for case in cases]) / held_out)
    return [
        Residual(
            row=case.run.id,
            model=case.run.model,
            one_host=(case.run.devices or 1) <= require_device(case.device).domain,
            log_ratio=round(float(ratio), 5),
        )
        for case, ratio in zip(cases, ratios, strict=True)
        if np.isfinite(ratio)
    ]


def calibrations_of(
    cases: Sequence[Case], fit: Fit, held_out: Array, *, name: str | None = None
) -> list[FrameworkCalibration]:
    """Returns one calibration per device and dtype of a fit."""
    residuals = residuals_of(cases, held_out)
    made = []
    # Runs in a non-default mode (such as eager) contribute to the fit but get no calibration.
    for variant in sorted({case.variant for case in cases if not case.variant.variation}):
        own = [case for case in cases if case.variant == variant]
        ids = {case.run.id for case in own}
        of_variant = [each for each in residuals if each.row in ids]
        device, dtype = variant.device, variant.dtype
        prefix = name or own[0].family + ("-experts" if own[0].experts else "")
        made.append(
            FrameworkCalibration(
                name=f"{prefix}-{device}-{dtype}",
                framework=own[0].family,
                device=device,
                precision=dtype,
                rows=tuple(sorted(ids)),
                residuals=tuple(of_variant if len(of_variant) >= 10 else residuals),
                seen=ranges([(group.layouts, group.workload) for group in group_cases(own)]),
                constants=fit.constants(variant),
                cells=None if fit.cells is None else fit.cells.entries,
                network_bytes_per_s=own[0].run.network_bytes_per_s,
            )
        )
    return made
