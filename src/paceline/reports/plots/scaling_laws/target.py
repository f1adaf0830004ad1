"""Plots of one target run: the fitted law, and predictions relative to measurements."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from paceline.core.plan import Estimate
from paceline.predict.history import HistoryEntry
from paceline.reports.plots.style import COLORS, GRAY, add_grid, blank_figure
from paceline.reports.tables.planning.forecasts import WRITTEN
from paceline.scaling.design import Belief
from paceline.scaling.fits.all_methods import ScalingFit
from paceline.scaling.surface import tokens_for

_MEASURED, _PREDICTED = COLORS[0], COLORS[1]


def plot_target(
    fit: ScalingFit, belief: Belief, budget: float, predicted: Estimate, measured: float | None
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
    sizes = belief.surface.optimal_parameters(budgets)
    law = [
        belief.loss(float(size), float(tokens_for(compute, size)))
        for compute, size in zip(budgets, sizes, strict=True)
    ]
    axes.plot(budgets, [each.value for each in law], color=_MEASURED, label="best loss, fitted")
    low, high = ([getattr(each, end) for each in law] for end in ("low", "high"))
    axes.fill_between(budgets, low, high, color=_MEASURED, alpha=0.15, lw=0)
    lowest, highest = predicted.low or predicted.value, predicted.high or predicted.value
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
    axes.set_xscale("log")
    axes.set_xlabel("compute (FLOPs)")
    axes.set_ylabel("held-out loss (nats per token)")
    add_grid(axes, "both")
    axes.legend(fontsize="small", frameon=False)
    return figure


def plot_errors(entries: Sequence[HistoryEntry]) -> Figure:
    """Draws each prediction with its interval, relative to the measurement."""
    shown = [each for each in entries if each.predicted is not None]
    figure = blank_figure("Predicted, relative to measured", (8.0, 0.9 + 0.55 * len(shown)))
    axes = figure.subplots()
    for place, entry in enumerate(shown):
        predicted = entry.predicted
        assert predicted is not None
        value, low, high = (
            100 * ((end if end is not None else predicted.value) / entry.measured - 1)
            for end in (predicted.value, predicted.low, predicted.high)
        )
        color = _PREDICTED if entry.is_inside is not False else COLORS[3]
        spread = [[value - low], [high - value]]
        axes.errorbar([value], [place], xerr=spread, fmt="s", color=color, capsize=5)
        axes.annotate(
            f"{value:+.1f}%",
            (value, place),
            (0, 7),
            textcoords="offset points",
            ha="center",
            fontsize="small",
        )
    axes.axvline(0, color=_MEASURED, label="measured")
    axes.set_yticks(range(len(shown)), [WRITTEN[each.quantity][0] for each in shown])
    axes.set_ylim(len(shown) - 0.4, -0.8)
    axes.set_xlabel("error of the prediction (%), with its 90% interval")
    axes.yaxis.set_minor_formatter(NullFormatter())
    add_grid(axes, "x")
    return figure
