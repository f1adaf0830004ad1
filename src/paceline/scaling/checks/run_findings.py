"""Findings about the runs: runs left out, inconsistent FLOPs, missing sizes and budgets."""

from collections.abc import Iterator, Sequence

import numpy as np

from paceline.core.finding import Finding
from paceline.scaling.fits.all_methods import ScalingFit
from paceline.scaling.fits.isoflop import find_profiles
from paceline.scaling.runs.sweep import Sweep
from paceline.scaling.runs.trimming import MOST_ABOVE_BEST
from paceline.scaling.surface import compute_for

_FEWEST_BUDGETS = 4
_SMALLEST_SPAN = 10.0
_FEWEST_SIZES = 5
_COMPUTE_TOLERANCE = 0.02
_USUAL_METHOD = "parametric"


def diagnose_runs(fit: ScalingFit) -> list[Finding]:
    """Returns problems with the runs that do not depend on the target budgets."""
    return [
        *_left_out(fit),
        *_method_choice(fit),
        *_compute_counting(fit.sweep),
        *_budgets(fit),
        *_edges(fit),
    ]


def _left_out(fit: ScalingFit) -> Iterator[Finding]:
    if len(fit.sweep) < len(fit.runs):
        yield Finding(
            name="runs_trimmed",
            message=f"{len(fit.runs) - len(fit.sweep)} of {len(fit.runs)} runs end more than "
            f"{MOST_ABOVE_BEST:.0%} above the best of their budget and are left out: without them "
            "held-out budgets are predicted better",
            remedy="spend the next runs on sizes nearer to that of the lowest loss",
        )
    gone = [remark for remark in fit.sweep.remarks if remark.is_left_out]
    if not gone:
        return
    rows = "; ".join(f"row {remark.row}: {remark.message}" for remark in gone[:5])
    more = f" and {len(gone) - 5} more" if len(gone) > 5 else ""
    yield Finding(
        name="runs_left_out",
        message=f"{len(gone)} rows are not used: {rows}{more}",
        remedy="check that they are not all on one side of the optimum",
    )


def _method_choice(fit: ScalingFit) -> Iterator[Finding]:
    if fit.choice.method == _USUAL_METHOD or fit.choice.error is None:
        return
    yield Finding(
        name="surface_did_not_hold",
        message=fit.choice.reason,
        remedy=f"use {fit.choice.method}'s N; the surface's N is shown next to it",
        figures={"held_out_error": fit.choice.error},
    )


def _compute_counting(sweep: Sweep) -> Iterator[Finding]:
    ratio = sweep.compute / compute_for(sweep.parameters, sweep.tokens)
    low, high = float(ratio.min()), float(ratio.max())
    if high / low - 1 > _COMPUTE_TOLERANCE:
        yield Finding(
            name="flops_counting",
            message=f"the stated compute is {low:.3g} to {high:.3g} times 6ND, depending on N: "
            "embedding, output layer or attention are counted in one but not in the other",
            remedy="count parameters and FLOPs in the same way for all sizes, the output layer in "
            "both",
        )
    elif abs(float(np.median(ratio)) - 1) > _COMPUTE_TOLERANCE:
        yield Finding(
            name="inconsistent_compute",
            message=f"the stated compute is {np.median(ratio):.3g} times 6ND",
            remedy="state budgets as 6ND, which ties N to D at a target",
        )


def _budgets(fit: ScalingFit) -> Iterator[Finding]:
    budgets = fit.sweep.budgets
    span = float(budgets[-1] / budgets[0])
    if len(budgets) < _FEWEST_BUDGETS or span < _SMALLEST_SPAN:
        yield Finding(
            name="too_few_budgets",
            message=f"{len(budgets)} budgets that span a factor of {span:.3g} determine the "
            "exponent",
            remedy=f"run at least {_FEWEST_BUDGETS} budgets over a factor of "
            f"{_SMALLEST_SPAN:.0f} or more",
        )
    thin = [
        f"{profile.compute:.3g}"
        for profile in find_profiles(fit.runs)
        if len(np.unique(fit.runs.parameters[profile.members])) < _FEWEST_SIZES
    ]
    if thin:
        yield Finding(
            name="too_few_sizes",
            message=f"fewer than {_FEWEST_SIZES} sizes at {listed(thin)} FLOPs: no point is left "
            "to check the parabola",
            remedy="add sizes there, on both sides of the lowest run",
        )


def _edges(fit: ScalingFit) -> Iterator[Finding]:
    for profile in fit.profiles:
        if profile.edge is not None:
            yield Finding(
                name="minimum_at_edge",
                message=f"at {profile.compute:.3g} FLOPs the {profile.edge} model tried "
                f"({fit.sweep.parameters[profile.lowest]:.3g} parameters) has the lowest loss, so "
                "the minimum is beyond it",
                remedy=f"run {'larger' if profile.edge == 'largest' else 'smaller'} models there",
            )


def listed(names: Sequence[str]) -> str:
    """Joins the first four names, and counts the rest."""
    shown = ", ".join(names[:4])
    return f"{shown} and {len(names) - 4} more" if len(names) > 4 else shown
