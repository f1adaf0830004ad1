"""Builds calibrations from measured rows: fits, held-out residuals, feature ranges.

The rows of one framework are fitted together, and each device and dtype gets a calibration. A model
is held out by fitting the rows of all other models. If a framework has only one model, one device
count is held out instead.
"""

from collections.abc import Sequence

import numpy as np

from paceline.core.errors import UsageError
from paceline.planner.calibrations.calibration import FrameworkCalibration, Residual, ranges
from paceline.planner.calibrations.cases import Array, Case, group_cases
from paceline.planner.calibrations.devices import require_device
from paceline.planner.calibrations.fit import Fit, fit_cases, predict_groups
from paceline.planner.calibrations.terms import USUAL_TERMS, terms_of


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
                cluster=fit.cluster(variant),
                hidden=fit.values["hidden"],
                rows=tuple(sorted(ids)),
                residuals=tuple(of_variant if len(of_variant) >= 10 else residuals),
                seen=ranges([(group.layouts, group.workload) for group in group_cases(own)]),
                constants=fit.constants(variant),
            )
        )
    return made
