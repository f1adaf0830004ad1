"""Fits a framework's step-time constants to measured steps, and builds its calibrations.

The fit minimizes the log ratio of predicted to measured seconds with scipy's least squares. The
loss grows linearly for errors beyond `NOISE`, and every constant has a prior. All devices and
dtypes of a framework are fitted together. They share every constant except the matmul rate, which
has an offset per (device, dtype) in addition to the shared value; each gets a calibration.

A model is held out by fitting the rows of all other models. If a framework has only one model, one
device count is held out instead.
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from paceline.core.errors import UsageError
from paceline.planner.calibrations.calibration import FrameworkCalibration, Residual, ranges
from paceline.planner.calibrations.cases import (
    Array,
    Case,
    CaseGroup,
    Variant,
    group_cases,
    predictable,
)
from paceline.planner.calibrations.parameters import (
    ALWAYS,
    PRIORS,
    TERMS,
    USUAL_TERMS,
    cluster_of,
    require_device,
    terms_of,
)
from paceline.planner.published import published_runs, read_rows
from paceline.predict.cost.cluster import Cluster, MeasuredCorrections, cell_of
from paceline.predict.cost.step_time import step_time

NOISE = 0.03
"""Assumed spread of repeated measurements, in log seconds."""
VARIANT_DEVIATION = 0.3
"""Prior standard deviation of a variant's log offset from the framework's matmul share."""
_SLOW_LATENCY_S = 5e-3
_EVALUATIONS = 36


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """Fitted constants of one framework."""

    values: Mapping[str, float]
    offsets: Mapping[Variant, float]
    """Log ratio of a variant's matmul share to the shared one."""
    cells: MeasuredCorrections | None = None

    def constants(self, variant: Variant) -> dict[str, float]:
        """Returns the constants of one variant."""
        values = dict(self.values)
        share = values["matmul_share"] * float(np.exp(self.offsets.get(variant, 0.0)))
        values["matmul_share"] = min(share, 1.0)
        return values

    def cluster(self, variant: Variant, *, overlaps_tensor: bool = False) -> Cluster:
        """Returns the cluster of one variant."""
        values = self.constants(variant)
        if overlaps_tensor:
            values["inner_share"] = values["inner_share"] * values["async_share"]
        device = require_device(variant.device)
        return cluster_of(values, device, variant.dtype, cells=self.cells)


def predict_groups(groups: Sequence[CaseGroup], fit: Fit, size: int) -> Array:
    """Returns the predicted seconds of every case, in the order before grouping."""
    seconds = np.empty(size)
    for group in groups:
        cluster = fit.cluster(group.variant, overlaps_tensor=group.overlaps_tensor)
        steps = step_time(group.layouts, group.workload, cluster, hidden=fit.values["hidden"])
        seconds[group.index] = steps.total_s
    return seconds


def fit_cases(cases: Sequence[Case], *, terms: Sequence[str] = USUAL_TERMS) -> Fit:
    """Fits the constants of the given terms to cases of one framework."""
    from scipy.optimize import least_squares

    cases = list(cases)
    groups = group_cases(cases)
    measured = np.log([case.step_s for case in cases])
    variants = sorted({case.variant for case in cases})
    names = [*ALWAYS, *(name for term in terms for name in TERMS.get(term, ()))]
    if any(case.overlaps_tensor for case in cases):
        names.append("async_share")
    priors = [PRIORS[name] for name in names]
    mean = np.array([*(np.log(prior.mean) for prior in priors), *(0.0 for _ in variants)])
    deviation = np.array(
        [*(prior.deviation for prior in priors), *(VARIANT_DEVIATION for _ in variants)]
    )
    lower = mean - 5 * deviation
    upper = mean + 5 * deviation
    upper[: len(names)] = np.minimum(upper[: len(names)], [np.log(prior.most) for prior in priors])
    # A single variant needs no offset.
    free = np.ones(len(mean), dtype=bool)
    free[len(names) :] = len(variants) > 1

    def unpack(point: npt.NDArray[np.float64]) -> Fit:
        whole = mean.copy()
        whole[free] = point
        values = dict(zip(names, np.exp(whole[: len(names)]).tolist(), strict=True))
        return Fit(
            values=values, offsets=dict(zip(variants, whole[len(names) :].tolist(), strict=True))
        )

    def residuals(point: npt.NDArray[np.float64]) -> Array:
        predicted = np.log(predict_groups(groups, unpack(point), len(cases)))
        misfit = (predicted - measured) / NOISE
        # Grows with the square root of the misfit, so that its square grows linearly.
        robust = np.sign(misfit) * np.sqrt(2 * (np.sqrt(1 + misfit**2) - 1))
        return np.concatenate([robust, (point - mean[free]) / deviation[free]])

    starts = [mean]
    if "outer_latency_s" in names:
        # Rings over many hosts can be latency-bound. The gradient at the prior mean does not show
        # that, so a second start begins at a high latency.
        slow = mean.copy()
        slow[names.index("outer_latency_s")] = np.log(_SLOW_LATENCY_S)
        starts.append(slow)
    found = [
        least_squares(
            residuals,
            np.clip(each, lower + 1e-9, upper - 1e-9)[free],
            bounds=(lower[free], upper[free]),
            x_scale=deviation[free],
            diff_step=1e-4,
            ftol=1e-5,
            xtol=1e-5,
            max_nfev=_EVALUATIONS,
        )
        for each in starts
    ]
    fit = unpack(min(found, key=lambda each: each.cost).x)
    if "cells" not in terms:
        return fit
    ratios = measured - np.log(predict_groups(groups, fit, len(cases)))
    cells = np.empty(len(cases), dtype=np.int64)
    for group in groups:
        tokens = group.workload.tokens / group.layouts.context
        width = group.workload.shape.d_model
        cells[group.index] = cell_of(tokens, width, group.layouts.tensor)
    return dataclasses.replace(fit, cells=MeasuredCorrections.of(cells, ratios))


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


def calibrate_rows(path: pathlib.Path, *, with_published: bool) -> list[FrameworkCalibration]:
    """Fits the measured runs of a file by framework, if asked with the published runs of each."""
    pools: dict[str, list[Case]] = {}
    for case in predictable(read_rows(path)):
        pools.setdefault(case.pool, []).append(case)
    if not pools:
        raise UsageError(
            f"{path}: no row can be predicted; each needs model, devices, data, "
            "context_length, global_batch, and s/iteration or tokens/s/device"
        )
    for case in predictable(published_runs()) if with_published else ():
        if case.pool in pools:
            pools[case.pool].append(case)
    return [each for cases in pools.values() for each in build_calibrations(cases)]


def build_calibrations(
    cases: Sequence[Case], *, name: str | None = None
) -> list[FrameworkCalibration]:
    """Fits the rows of one pool and returns one calibration per device and dtype."""
    if not cases:
        raise UsageError("no row can be predicted: give model, devices, batch, layout and time")
    terms = terms_of(cases[0].pool)
    fit = fit_cases(cases, terms=terms)
    return calibrations_of(cases, fit, predict_held_out(cases, terms=terms), name=name)


def calibrations_of(
    cases: Sequence[Case], fit: Fit, held_out: Array, *, name: str | None = None
) -> list[FrameworkCalibration]:
    """Returns one calibration per device and dtype of a fit."""
    measured = np.array([case.step_s for case in cases])
    ratios = np.log(measured / held_out)
    residuals = [
        Residual(
            row=case.run.id,
            model=case.run.model,
            one_host=(case.run.devices or 1) <= require_device(case.device).domain,
            log_ratio=round(float(ratio), 5),
        )
        for case, ratio in zip(cases, ratios, strict=True)
        if np.isfinite(ratio)
    ]
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
            )
        )
    return made
