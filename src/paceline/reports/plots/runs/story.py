"""Summary plot of one run: planned and measured step times, and loss."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paceline.core.units import format_seconds
from paceline.predict.history import HistoryEntry
from paceline.reports.evidence.training_run import TrainingRun
from paceline.reports.plots.runs.lines import (
    MEASURED,
    PREDICTED,
    draw_held_out,
    mark_resumptions,
    smoothed,
)
from paceline.reports.plots.style import GRAY, add_grid, blank_figure
from paceline.reports.tables.planning.forecasts import between

_ABOVE = 1.6
"""The step-time axis ends at this multiple of the larger of predicted and measured time."""


def plot_story(run: TrainingRun, step: HistoryEntry, subtitle: str) -> Figure:
    """Draws the step times of a run with the predicted interval, and its loss.

    Args:
        run: The run.
        step: The predicted and measured step time; must have a prediction.
        subtitle: The model and hardware of the run.
    """
    figure = blank_figure("Planned, trained, compared", (9.0, 3.9))
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_steps(left, run, step)
    _draw_loss(right, run)
    for axes in (left, right):
        mark_resumptions(axes, run, has_label=False)
        axes.set_xlabel("step")
        add_grid(axes, "y")
    figure.supxlabel(subtitle, fontsize="small", color=GRAY)
    return figure


def _draw_steps(axes: Axes, run: TrainingRun, step: HistoryEntry) -> None:
    predicted = step.predicted
    assert predicted is not None
    steps = [row.step for row in run.steps]
    axes.plot(
        steps,
        [1e3 * row.step_time_s for row in run.steps],
        ".",
        color=MEASURED,
        markersize=3,
        alpha=0.6,
        label=f"measured: {format_seconds(step.measured)} in the median",
    )
    label = f"planned: {format_seconds(predicted.value)}"
    if predicted.low is not None and predicted.high is not None:
        label += f", 90% interval {between(*map(format_seconds, (predicted.low, predicted.high)))}"
        axes.axhspan(1e3 * predicted.low, 1e3 * predicted.high, color=PREDICTED, alpha=0.2, lw=0)
    axes.axhline(1e3 * predicted.value, color=PREDICTED, label=label)
    highest = max(predicted.high or predicted.value, step.measured)
    axes.set_ylim(0, _ABOVE * 1e3 * highest)
    axes.set_ylabel("step time (ms)")
    axes.legend(loc="lower center", frameon=False, fontsize="small")


def _draw_loss(axes: Axes, run: TrainingRun) -> None:
    steps, losses = [row.step for row in run.steps], [row.loss for row in run.steps]
    axes.plot(*smoothed(steps, losses), color=MEASURED, label="training")
    draw_held_out(axes, run, "held-out text")
    axes.set_ylabel("loss (nats per token)")
    axes.legend(frameon=False, fontsize="small")
