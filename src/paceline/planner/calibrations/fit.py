"""Fits the constants of a framework on its devices to measured steps.

The logarithms of predicted over measured seconds are made small, by scipy's least squares with a
loss that grows like the absolute error beyond `NOISE`; a prior on every constant is part of the
sum. All devices and dtypes of a framework are fitted together: they share every constant but the
matmul rate, which has an offset for each (device, dtype) beside the shared one.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from paceline.planner.calibrations.cases import Array, Case, CaseGroup, Variant, group_cases
from paceline.planner.calibrations.devices import require_device
from paceline.planner.calibrations.parameters import ALWAYS, PRIORS, TERMS, cluster_of
from paceline.planner.calibrations.terms import USUAL_TERMS
from paceline.planner.cost.cluster import Cluster
from paceline.planner.cost.measured_cells import MeasuredCells, cell_of
from paceline.planner.cost.step_time import step_time

NOISE = 0.03
"""Spread of repeated measurements that the fit assumes, in logarithms of seconds."""
VARIANT_DEVIATION = 0.3
"""Prior of the logarithm by which a device or dtype differs from its framework's matmul share."""
_SLOW_LATENCY_S = 5e-3
_EVALUATIONS = 36


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """Constants of one framework."""

    values: Mapping[str, float]
    offsets: Mapping[Variant, float]
    """Logarithm of the matmul share of a device and dtype, less the shared one."""
    cells: MeasuredCells | None = None

    def constants(self, variant: Variant) -> dict[str, float]:
        """Returns the constants on one device with one dtype."""
        values = dict(self.values)
        share = values["matmul_share"] * float(np.exp(self.offsets.get(variant, 0.0)))
        values["matmul_share"] = min(share, 1.0)
        return values

    def cluster(self, variant: Variant, *, overlaps_tensor: bool = False) -> Cluster:
        """Returns the cluster of one device and dtype."""
        values = self.constants(variant)
        if overlaps_tensor:
            values["inner_share"] = values["inner_share"] * values["async_share"]
        device = require_device(variant.device)
        return cluster_of(values, device, variant.dtype, cells=self.cells)


def predict_groups(groups: Sequence[CaseGroup], fit: Fit, size: int) -> Array:
    """Returns the seconds of every case, in the order of the list that was grouped."""
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
    # One variant has nothing to differ from.
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
        # Grows like the square root of the misfit, so that its square grows like the misfit.
        robust = np.sign(misfit) * np.sqrt(2 * (np.sqrt(1 + misfit**2) - 1))
        return np.concatenate([robust, (point - mean[free]) / deviation[free]])

    starts = [mean]
    if "outer_latency_s" in names:
        # Rings over many hosts can be all latency, which no gradient at the usual one shows.
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
    return dataclasses.replace(fit, cells=MeasuredCells.of(cells, ratios))
