"""Plots of scaling laws: profiles, laws, surface, residuals, and predictions for a target run."""

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from paceline.core.plan import Estimate
from paceline.predict.history import HistoryEntry
from paceline.records.schema import interval_ends
from paceline.reports.plots.style import COLORS, GRAY, add_grid, add_label, blank_figure
from paceline.reports.tables.predictions import WRITTEN
from paceline.scaling.design import Posterior
from paceline.scaling.fits.all_methods import ScalingFit
from paceline.scaling.fits.prediction import predict
from paceline.scaling.surface import tokens_for

_FARTHEST = 1e24
_METHOD_COLORS = {
    "lowest_run": COLORS[1],
    "parabola": COLORS[2],
    "envelope": COLORS[5],
    "huber": COLORS[3],
    "parametric": COLORS[0],
}


def plot_profiles(fit: ScalingFit) -> Figure:
    """Draws loss by model size for every budget, with parabola, surface and both minima."""
    figure, (axes,) = _figure("Loss by model size at equal compute", fit, 1)
    sweep = fit.sweep
    surface = fit.parametric.surface if fit.has_surface else None
    for profile, color in zip(fit.profiles, _shades(len(fit.profiles)), strict=True):
        sizes, losses = sweep.parameters[profile.members], sweep.loss[profile.members]
        axes.plot(sizes, losses, "o", color=color, ms=3.5)
        grid = np.geomspace(sizes[0], sizes[-1], 200)
        if surface is not None:
            fitted = surface.loss(grid, tokens_for(profile.compute, grid))
            axes.plot(grid, fitted, "-", color=color, lw=1)
        if profile.coefficients is not None and profile.vertex and profile.vertex_loss:
            offset = np.log(grid / sweep.parameters[profile.lowest])
            constant, slope, curvature = profile.coefficients
            axes.plot(grid, constant + slope * offset + curvature * offset**2, ":", color=color)
            axes.plot([profile.vertex], [profile.vertex_loss], "x", color="black", ms=6, zorder=4)
        budget, last_run = f"{profile.compute:.0e}".replace("e+", "e"), (sizes[-1], losses[-1])
        add_label(axes, budget, last_run, (4, 0), fontsize="x-small", color=color, va="center")
    if surface is not None:
        budgets = np.geomspace(sweep.compute.min(), sweep.compute.max(), 100)
        optimum = surface.optimal_parameters(budgets), surface.optimal_loss(budgets)
        axes.plot(*optimum, "--", color="black", lw=1, label="optimum of the surface")
        axes.plot([], [], "-", color=GRAY, label="surface")
    axes.plot([], [], ":", color=GRAY, label="parabola")
    axes.plot([], [], "x", color="black", label="vertex of the parabola")
    _logarithmic(axes, "parameters N", "final loss", log_y=False)
    axes.legend(fontsize="small", loc="upper right", frameon=False)
    return figure


def plot_laws(fit: ScalingFit) -> Figure:
    """Draws optimal N and D against C with bands, up to at least 1e24 FLOPs."""
    figure, panels = _figure("Compute-optimal model and data", fit, 2)
    budgets = np.geomspace(fit.sweep.compute.min(), _reach(fit), 120)
    for method in fit.methods:
        color = _METHOD_COLORS[method.method]
        answer = predict(method, budgets)
        for axes, band in zip(panels, (answer.parameters, answer.tokens), strict=True):
            # Dashed, because the Huber line usually covers the parametric one.
            style = "--" if method.method == "huber" else "-"
            axes.plot(budgets, band.value, style, color=color, label=method.method, zorder=3)
            axes.fill_between(budgets, band.low, band.high, color=color, alpha=0.15, lw=0)
    vertices = [
        (profile.compute, profile.vertex) for profile in fit.profiles if profile.vertex is not None
    ]
    lowest = [(profile.compute, fit.sweep.parameters[profile.lowest]) for profile in fit.profiles]
    for points, marker, color in (
        (vertices, "x", _METHOD_COLORS["parabola"]),
        (lowest, "o", _METHOD_COLORS["lowest_run"]),
    ):
        if points:
            compute, sizes = np.array(points, dtype=np.float64).T
            for axes, best in zip(panels, (sizes, tokens_for(compute, sizes)), strict=True):
                axes.plot(compute, best, marker, color=color, ms=4, mfc="none")
    largest = float(fit.sweep.compute.max())
    for axes, name in zip(panels, ("best N (parameters)", "best D (tokens)"), strict=True):
        axes.axvline(largest, color=GRAY, lw=0.8, ls="--")
        small = {"xycoords": ("data", "axes fraction"), "fontsize": "x-small", "color": GRAY}
        add_label(axes, "largest run", (largest, 0.03), (4, 0), **small)
        _logarithmic(axes, "compute C (FLOPs)", name)
    panels[0].legend(fontsize="small", frameon=False)
    return figure


def plot_surface(fit: ScalingFit) -> Figure:
    """Draws contours of the fitted loss over N and C, the runs, and the efficient frontier."""
    figure, (axes,) = _figure("Loss surface and efficient frontier", fit, 1)
    surface, sweep = fit.parametric.surface, fit.sweep
    budgets = np.geomspace(sweep.compute.min() / 2, _reach(fit), 200)
    best = surface.optimal_parameters(budgets)
    sizes = np.geomspace(min(best[0] / 8, sweep.parameters.min() / 2), best[-1] * 8, 200)
    grid_c, grid_n = np.meshgrid(budgets, sizes)
    loss = surface.loss(grid_n, tokens_for(grid_c, grid_n))
    floor = surface.irreducible
    low, high = float(surface.optimal_loss(budgets[-1])), float(sweep.loss.max())
    levels = floor + np.geomspace((low - floor) * 1.02, high - floor, 14)
    colors = _shades(len(levels))[::-1]
    axes.contour(grid_c, grid_n, loss, levels=levels, colors=colors, linewidths=0.9)
    axes.plot(budgets, best, color=COLORS[1], lw=2, label="efficient frontier")
    # Each contour is labelled at its leftmost point, where it meets the frontier.
    for level, compute in zip(levels, surface.compute_for_loss(levels), strict=True):
        if budgets[0] < compute < budgets[-1]:
            meeting = (compute, float(surface.optimal_parameters(compute)))
            add_label(axes, f"{level:.2f}", meeting, (-3, 5), fontsize="x-small", ha="right")
    axes.plot(sweep.compute, sweep.parameters, ".", color=GRAY, ms=4, label="runs")
    _logarithmic(axes, "compute C (FLOPs)", "parameters N")
    axes.set_ylim(sizes[0], sizes[-1])
    axes.legend(fontsize="small", frameon=False, loc="upper left")
    return figure


def plot_residuals(fit: ScalingFit) -> Figure:
    """Draws the residuals of the parametric surface by model size and by compute."""
    figure, panels = _figure("Residuals of the parametric fit", fit, 2)
    residuals = fit.parametric.residuals
    largest = float(np.abs(residuals).max())
    # Residuals of noiseless runs are parts per billion, which would show as 0.00%.
    scale, unit = (100.0, "%") if largest > 1e-5 else (1e9, "parts per billion")
    columns = {"parameters N": fit.sweep.parameters, "compute C (FLOPs)": fit.sweep.compute}
    index = fit.sweep.budget_index
    for axes, (name, column) in zip(panels, columns.items(), strict=True):
        for group, color in enumerate(_shades(int(index.max()) + 1)):
            chosen = index == group
            axes.plot(column[chosen], scale * residuals[chosen], "o", color=color, ms=3.5)
        axes.axhline(0, color=GRAY, lw=0.8)
        _logarithmic(axes, name, f"log of loss over fitted loss ({unit})", log_y=False)
    return figure


SCALING_PLOTS: dict[str, Callable[[ScalingFit], Figure]] = {
    "scaling-profiles": plot_profiles,
    "scaling-laws": plot_laws,
    "scaling-surface": plot_surface,
    "scaling-residuals": plot_residuals,
}


def _figure(title: str, fit: ScalingFit, num_panels: int) -> tuple[Figure, list[Axes]]:
    figure = blank_figure(title + "\n", (8.0 if num_panels == 1 else 10.0, 4.8))
    panels = list(np.atleast_1d(figure.subplots(1, num_panels)))
    sweep = fit.sweep
    text = f"{len(sweep)} runs, {len(sweep.budgets)} budgets, up to {sweep.compute.max():.3g} FLOPs"
    if fit.has_surface:
        surface = fit.parametric.surface
        text += (
            f"; L = {surface.irreducible:.4g} + {surface.parameter_scale:.4g}/N^"
            f"{surface.parameter_exponent:.4g} + {surface.token_scale:.4g}/D^"
            f"{surface.token_exponent:.4g}"
        )
    figure.text(0.5, 0.925, text, ha="center", fontsize="x-small", color=GRAY)
    for axes in panels:
        add_grid(axes, "both")
    return figure, panels


def _logarithmic(axes: Axes, x_label: str, y_label: str, *, log_y: bool = True) -> None:
    axes.set_xscale("log")
    if log_y:
        axes.set_yscale("log")
    axes.set(xlabel=x_label, ylabel=y_label)


def _shades(number: int) -> list[tuple[float, ...]]:
    return [tuple(colormaps["viridis"](share)) for share in np.linspace(0.0, 0.85, number)]


def _reach(fit: ScalingFit) -> float:
    return max(_FARTHEST, 10 * float(fit.sweep.compute.max()))


_MEASURED, _PREDICTED = COLORS[0], COLORS[1]


def plot_target(
    fit: ScalingFit,
    posterior: Posterior,
    budget: float,
    predicted: Estimate,
    measured: float | None,
) -> Figure:
    """Draws the losses of a sweep, the fitted best loss by compute, and the target."""
    figure = blank_figure("From small runs to the large one", (8.0, 4.4))
    axes = figure.subplots()
    sweep = fit.runs
    axes.plot(sweep.compute, sweep.loss, "o", color=GRAY, ms=3.5, alpha=0.6, label="small runs")
    best = [
        (profile.compute, profile.vertex_loss)
        for profile in fit.profiles
        if profile.vertex_loss is not None
    ]
    if best:
        axes.plot(*zip(*best, strict=True), "x", color="black", label="best of each level")
    budgets = np.geomspace(float(sweep.compute.min()), 1.3 * budget, 60)
    sizes = posterior.surface.optimal_parameters(budgets)
    law = [
        posterior.loss(float(size), float(tokens_for(compute, size)))
        for compute, size in zip(budgets, sizes, strict=True)
    ]
    axes.plot(budgets, [each.value for each in law], color=_MEASURED, label="best loss, fitted")
    low, high = ([getattr(each, end) for each in law] for end in ("low", "high"))
    axes.fill_between(budgets, low, high, color=_MEASURED, alpha=0.15, lw=0)
    lowest, highest = interval_ends(predicted)
    axes.errorbar(
        [budget],
        [predicted.value],
        yerr=[[predicted.value - lowest], [highest - predicted.value]],
        fmt="s",
        color=_PREDICTED,
        capsize=6,
        label=f"predicted {predicted.value:.4f}, 90% interval {lowest:.4f} to {highest:.4f}",
    )
    if measured is not None:
        label = f"measured {measured:.4f}"
        axes.plot([budget], [measured], "*", color="#c0392b", ms=12, zorder=5, label=label)
    axes.set(xscale="log", xlabel="compute (FLOPs)", ylabel="held-out loss (nats per token)")
    add_grid(axes, "both")
    axes.legend(fontsize="small", frameon=False)
    return figure


def plot_errors(entries: Sequence[HistoryEntry]) -> Figure:
    """Draws each prediction with its interval, relative to the measurement."""
    shown = [each for each in entries if each.predicted is not None]
    figure = blank_figure("Predicted, relative to measured", (8.0, 0.9 + 0.55 * len(shown)))
    axes = figure.subplots()
    for position, entry in enumerate(shown):
        predicted = entry.predicted
        assert predicted is not None
        value, low, high = (
            100 * (end / entry.measured - 1) for end in (predicted.value, *interval_ends(predicted))
        )
        color = _PREDICTED if entry.is_inside is not False else COLORS[3]
        spread = [[value - low], [high - value]]
        axes.errorbar([value], [position], xerr=spread, fmt="s", color=color, capsize=5)
        add_label(axes, f"{value:+.1f}%", (value, position), (0, 7), ha="center", fontsize="small")
    axes.axvline(0, color=_MEASURED, label="measured")
    axes.set_yticks(range(len(shown)), [WRITTEN[each.quantity][0] for each in shown])
    axes.set(
        ylim=(len(shown) - 0.4, -0.8), xlabel="error of the prediction (%), with its 90% interval"
    )
    axes.yaxis.set_minor_formatter(NullFormatter())
    add_grid(axes, "x")
    return figure
