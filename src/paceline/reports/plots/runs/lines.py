"""Common parts of the plots of a run: colours, thinned and smoothed lines, marks."""

import itertools
import statistics
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paceline.reports.evidence.training_run import TrainingRun
from paceline.reports.plots.style import COLORS, GRAY, add_grid, blank_figure

MEASURED, PREDICTED, RESUMED = COLORS[0], COLORS[1], COLORS[3]
Middle = Callable[[Sequence[float]], float]
"""A function such as mean or median."""
_MOST_POINTS = 600
_SMOOTHED_PARTS = 50
"""A point of a smoothed line averages about 1 / `_SMOOTHED_PARTS` of the run."""


def run_figure(title: str, run: TrainingRun) -> tuple[Figure, Axes]:
    """Returns an empty figure with the run's name and tokens per step as subtitle."""
    figure = blank_figure(title, (8.0, 4.2))
    axes = figure.subplots()
    tokens = f"{run.expected.tokens_per_step:,} tokens per step"
    axes.set_title(f"{run.name}, {tokens}".replace("$", r"\$"), fontsize="small", color=GRAY)
    add_grid(axes, "y")
    return figure, axes


def mark_resumptions(axes: Axes, run: TrainingRun, *, has_label: bool = True) -> None:
    """Draws a vertical line at every resumption."""
    for number, step in enumerate(run.resumptions):
        label = "resumed" if has_label and number == 0 else None
        axes.axvline(step, color=RESUMED, linestyle=":", linewidth=1.2, label=label)


def draw_held_out(axes: Axes, run: TrainingRun, label: str) -> None:
    """Draws the held-out losses of the evaluations."""
    axes.plot(
        [row.step for row in run.evaluations],
        [row.loss for row in run.evaluations],
        "o-",
        color=PREDICTED,
        markersize=4,
        linewidth=0.8,
        label=label,
    )


def thinned(
    places: Sequence[float], values: Sequence[float], middle: Middle = statistics.fmean
) -> tuple[list[float], list[float]]:
    """Returns a line of at most `_MOST_POINTS` points, each the `middle` of consecutive values."""
    groups = min(len(values), _MOST_POINTS)
    borders = [number * len(values) // groups for number in range(groups + 1)] if groups else [0]
    spans = list(itertools.pairwise(borders))
    return (
        [statistics.fmean(places[begin:end]) for begin, end in spans],
        [middle(values[begin:end]) for begin, end in spans],
    )


def smoothed(
    places: Sequence[float], values: Sequence[float], middle: Middle = statistics.fmean
) -> tuple[list[float], list[float]]:
    """Returns a thinned line, smoothed by the `middle` of a window of fixed length."""
    thin_places, thin_values = thinned(places, values, middle)
    reach = max(1, len(thin_values) // (2 * _SMOOTHED_PARTS))
    return thin_places, [
        middle(thin_values[max(0, place - reach) : place + reach + 1])
        for place in range(len(thin_values))
    ]
