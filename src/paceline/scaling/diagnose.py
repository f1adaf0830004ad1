"""Searches a sweep and its fits for known pitfalls of scaling laws.

Each check is a function that yields the findings of one pitfall. Thresholds are set where the
answer moves by more than a few per cent, not at the limit of statistical detection.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from paceline.core.errors import UsageError
from paceline.core.finding import Finding
from paceline.scaling.fits.all_methods import ScalingFit
from paceline.scaling.fits.isoflop import curve_losses, find_profiles, fit_lowest_run, fit_parabola
from paceline.scaling.fits.parametric import (
    LackOfFit,
    SurfaceFit,
    find_lack_of_fit,
    fit_parametric,
    residuals_of,
)
from paceline.scaling.fits.prediction import DEFAULT_LEVEL, predict
from paceline.scaling.surface import Array, compute_for, tokens_for
from paceline.scaling.sweep import MOST_ABOVE_BEST, Sweep

_FEWEST_BUDGETS = 4
_SMALLEST_SPAN = 10.0
_FEWEST_SIZES = 5
_COMPUTE_TOLERANCE = 0.02
_USUAL_METHOD = "parametric"
_BIAS = 0.02
_OUTLYING_DEVIATIONS = 6.0
_SMALLEST_OUTLIER = 0.005
_FARTHEST = 30.0
_IRREDUCIBLE_FRACTION = 0.8
_DISAGREEMENT = 1.25
_WIDEST = 3.0
_MOST_FAILED = 0.05
_UNANNEALED = 0.01


def diagnose(
    fit: ScalingFit, compute: Sequence[float], level: float = DEFAULT_LEVEL
) -> list[Finding]:
    """Returns problems with a fit and with extrapolating it to the given budgets.

    Args:
        fit: The fits of all methods.
        compute: The budgets in FLOPs.
        level: Coverage probability of the intervals that are compared.
    """
    targets = np.asarray(compute, dtype=np.float64)
    findings = [
        *_left_out(fit),
        *_method_choice(fit),
        *_compute_counting(fit.sweep),
        *_budgets(fit),
        *_edges(fit),
    ]
    if fit.has_surface:
        findings += [
            *_outliers(fit),
            *_misspecification(fit),
            *_curves(fit),
            *_method_bias(fit, targets),
            *_determination(fit, targets, level),
            *_distance(fit, targets),
            *_disagreement(fit, targets, level),
        ]
    return findings


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
            message=f"fewer than {_FEWEST_SIZES} sizes at {_listed(thin)} FLOPs: no point is left "
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


def _listed(names: Sequence[str]) -> str:
    """Joins the first four names, and counts the rest."""
    shown = ", ".join(names[:4])
    return f"{shown} and {len(names) - 4} more" if len(names) > 4 else shown


def noise_free_bias(fit: ScalingFit, method: str, compute: Array) -> Array:
    """Returns the relative error of a method's best N on noise-free data.

    The method is fitted to the same runs, with their losses replaced by those of the fitted
    surface. The remaining error is the method's bias, which no interval covers.
    """
    surface = fit.parametric.surface
    loss = surface.loss(fit.sweep.parameters, fit.sweep.tokens)
    twin = dataclasses.replace(fit.sweep, loss=loss)
    if method == "parabola":
        found = fit_parabola(twin, np.ones((1, len(twin)))).optimum(compute)[0]
    else:
        found = fit_lowest_run(twin, num_draws=1).optimum(compute)[0]
    return np.asarray(found / surface.optimal_parameters(compute) - 1)


def _outliers(fit: ScalingFit) -> Iterator[Finding]:
    surfaces = [found for found in fit.methods if isinstance(found, SurfaceFit)]
    # The first surface is Huber's fit, if present: the outliers themselves do not bias it.
    residuals = residuals_of(surfaces[0].surface, fit.runs)
    spread = 1.4826 * float(np.median(np.abs(residuals - np.median(residuals))))
    threshold = max(_OUTLYING_DEVIATIONS * spread, _SMALLEST_OUTLIER)
    runs = np.flatnonzero(np.abs(residuals) > threshold)
    sweep = fit.runs
    named = [
        f"N {sweep.parameters[run]:.3g}, C {sweep.compute[run]:.3g} ({residuals[run]:+.1%})"
        for run in runs
    ]
    if named:
        yield Finding(
            name="outlying_runs",
            message=f"{len(runs)} losses are far from the surface: {_listed(named)}",
            remedy="check those runs (divergence, a wrong entry); mark them or repeat them",
        )


def _misspecification(fit: ScalingFit) -> Iterator[Finding]:
    lack = _lack_of_fit(fit)
    if lack is None or not lack.is_certain:
        return
    yield Finding(
        name="misspecified_surface",
        message=f"the residuals have a pattern of {lack.size:.2%} of the loss, which noise "
        f"produces with probability {lack.chance:.1g}: the runs do not follow E + A/N^a + B/D^b; "
        f"the pattern resembles {lack.resembles}",
        remedy="tune the learning rate at every size, scale warm-up and schedule with the run, "
        "leave out the smallest models; until then no interval here can be trusted",
    )


def _lack_of_fit(fit: ScalingFit) -> LackOfFit | None:
    """Tests a surface fitted to all runs, because trimmed runs are evidence of a misfit."""
    if len(fit.sweep) < len(fit.runs):
        try:
            found = fit_parametric(fit.runs, np.ones((1, len(fit.runs))))
            return find_lack_of_fit(fit.runs, found)
        except UsageError:
            pass
    return find_lack_of_fit(fit.sweep, fit.parametric)


def _curves(fit: ScalingFit) -> Iterator[Finding]:
    if not fit.sweep.has_curves:
        return
    sizes, budgets, losses = curve_losses(fit.sweep)
    grid_sizes, grid_budgets = np.meshgrid(sizes, budgets, indexing="ij")
    expected = fit.parametric.surface.loss(grid_sizes, tokens_for(grid_budgets, grid_sizes))
    excess = float(np.nanmedian(losses / expected)) - 1
    if excess < _UNANNEALED:
        return
    yield Finding(
        name="unannealed_curves",
        message=f"the middle of a training curve is {excess:.1%} above the loss of a run that "
        "ended there: its learning rate had not decayed",
        remedy="do not use the envelope; train each length with its own schedule",
    )


def _method_bias(fit: ScalingFit, targets: Array) -> Iterator[Finding]:
    findings = {
        "parabola": (
            *("parabola_bias", "a parabola is not the shape of a loss profile"),
            "use the parametric method, or sizes nearer to the minimum",
        ),
        "lowest_run": (
            *("coarse_sizes", "the lowest run is one of the sizes tried, not the best one"),
            "use the parametric method or more sizes",
        ),
    }
    # A surface that failed on held-out budgets is no reference for the bias of other methods.
    names = {found.method for found in fit.methods} if isinstance(fit.chosen, SurfaceFit) else ()
    for method, (name, reason, remedy) in findings.items():
        if method not in names:
            continue
        try:
            bias = noise_free_bias(fit, method, targets)
        except UsageError:
            continue
        worst = int(np.abs(bias).argmax())
        if abs(bias[worst]) > _BIAS:
            missed = f"N at {targets[worst]:.3g} FLOPs by {bias[worst]:+.0%}"
            message = f"{reason}: even without noise it would miss {missed}"
            yield Finding(name=name, message=message, remedy=remedy)


def _determination(fit: ScalingFit, targets: Array, level: float) -> Iterator[Finding]:
    found = fit.parametric
    band = predict(fit.chosen, targets, level).parameters
    ratio = band.high / band.low
    worst = int(ratio.argmax())
    if ratio[worst] > _WIDEST:
        yield Finding(
            name="undetermined",
            message=f"the {level:.0%} interval of N at {targets[worst]:.3g} FLOPs spans a "
            f"factor of {ratio[worst]:.3g}",
            remedy="buy more runs, the largest budgets first (`paceline scaling design`)",
        )
    if found.failed_fraction > _MOST_FAILED:
        yield Finding(
            name="undetermined",
            message=f"{found.failed_fraction:.0%} of the bootstrap replicates determine no surface",
            remedy="add sizes and budgets farther apart",
        )


def _distance(fit: ScalingFit, targets: Array) -> Iterator[Finding]:
    farthest = float(targets.max())
    factor = farthest / float(fit.sweep.compute.max())
    if factor <= _FARTHEST:
        return
    yield Finding(
        name="far_extrapolation",
        message=f"{farthest:.3g} FLOPs are {factor:.3g} times the largest budget tried",
        remedy="confirm the law with one run at a tenth of the target before the target run",
    )
    surface = fit.parametric.surface
    fraction = surface.irreducible / float(surface.optimal_loss(farthest))
    if fraction > _IRREDUCIBLE_FRACTION:
        yield Finding(
            name="irreducible_dominates",
            message=f"{fraction:.0%} of the loss predicted at {farthest:.3g} FLOPs is E, which no "
            "run comes near: an error in E goes into the prediction in full",
            remedy="trust N and D more than the loss; larger budgets pin E down",
        )


def _disagreement(fit: ScalingFit, targets: Array, level: float) -> Iterator[Finding]:
    own = predict(fit.chosen, targets, level).parameters
    chosen = fit.choice.method
    for found in fit.methods:
        other = predict(found, targets, level).parameters
        ratio = np.exp(np.abs(np.log(other.value / own.value)))
        worst = int(ratio.argmax())
        if ratio[worst] > _DISAGREEMENT:
            yield Finding(
                name="methods_disagree",
                message=f"at {targets[worst]:.3g} FLOPs {found.method} gives N = "
                f"{other.value[worst]:.3g}, {chosen} gives {own.value[worst]:.3g}",
                remedy=f"see the other findings for the reason; if there is none, {chosen} is the "
                "one that predicted held-out budgets",
            )
