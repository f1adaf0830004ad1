"""Plots of a run's throughput, step times against their prediction, and time by phase."""

import dataclasses
import operator
import statistics
from functools import partial

from matplotlib.figure import Figure

from paceline.core.units import format_duration, format_seconds
from paceline.reports.evidence.training_run import TrainingRun
from paceline.reports.plots.runs.lines import (
    MEASURED,
    PREDICTED,
    mark_resumptions,
    run_figure,
    smoothed,
)
from paceline.reports.plots.style import COLORS, GRAY, blank_figure
from paceline.reports.tables.columns import with_interval
from paceline.training.metrics import phase_times, steady_steps

_PHASES = {
    "compute_s": ("compute", COLORS[2], ""),
    "exposed_communication_s": ("exposed communication", COLORS[1], "///"),
    "data_wait_s": ("waiting for data", COLORS[5], "..."),
    "evaluation_s": ("evaluation", COLORS[0], ""),
    "checkpoint_s": ("checkpoint", COLORS[4], "\\\\\\"),
}
_NARROW = 0.06
"""Phases below this share of the time are labelled only in the legend."""


def plot_throughput(run: TrainingRun) -> Figure:
    """Draws tokens per second, measured and predicted."""
    figure, axes = run_figure("Throughput", run)
    expected = run.expected
    steps = [row.step for row in run.steps]
    speeds = [expected.tokens_per_s(row.step_time_s) for row in run.steps]
    # The median, because the time of a step after an evaluation or a checkpoint includes it.
    line = smoothed(steps, speeds, statistics.median)
    axes.plot(*line, color=MEASURED, label="median of neighbouring steps")
    if (step := expected.step_time) is not None:
        predicted = expected.tokens_per_s(step.value)
        axes.axhline(predicted, color=PREDICTED, linestyle="--", label="predicted")
    if expected.peak_flops_per_s is not None and expected.flops_per_step is not None:
        per_token = expected.flops_per_step / expected.tokens_per_step / expected.peak_flops_per_s
        conversions = (partial(operator.mul, per_token), partial(operator.mul, 1 / per_token))
        right = axes.secondary_yaxis("right", functions=conversions)
        right.yaxis.set_major_formatter("{x:.0%}")
        right.set_ylabel("model FLOPs utilization")
    mark_resumptions(axes, run)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylabel("tokens per second, all ranks")
    axes.set_xlabel("step")
    axes.legend(loc="lower right")
    return figure


def plot_step_times(run: TrainingRun) -> Figure:
    """Draws a histogram of step times, with the predicted step time."""
    predicted = run.expected.step_time
    title = "Step time" if predicted is None else "Step time: predicted against measured"
    figure, axes = run_figure(title, run)
    times = [1e3 * row.step_time_s for row in steady_steps(run.rows) or run.steps]
    median = statistics.median(times)
    # A few stragglers would squeeze all other steps into one bar. The label counts them instead.
    limit = 3 * median
    shown = [time_ms for time_ms in times if time_ms <= limit]
    beyond = len(times) - len(shown)
    label = f"{len(times):,} steps" + (f", {beyond:,} of them beyond the picture" if beyond else "")
    axes.hist(shown, bins=40, color=MEASURED, alpha=0.7, label=label)
    axes.axvline(median, color=MEASURED, label=f"median {format_seconds(median / 1e3)}")
    if predicted is not None:
        error = median / 1e3 / predicted.value - 1
        label = f"predicted {with_interval(predicted, format_seconds)}, measured {error:+.0%}"
        axes.axvline(1e3 * predicted.value, color=PREDICTED, linestyle="--", label=label)
    axes.set_xlabel("step time (ms)")
    axes.set_ylabel("steps")
    axes.legend()
    return figure


def plot_phases(run: TrainingRun) -> Figure:
    """Draws the time of the run as one bar, divided by phase."""
    times = phase_times(run.rows)
    figure = blank_figure("Time by phase", (8.0, 2.6))
    axes = figure.subplots()
    begin = 0.0
    for field, seconds in dataclasses.asdict(times).items():
        name, color, hatch = _PHASES[field]
        share = seconds / times.total_s
        axes.barh(
            [0],
            [share],
            left=begin,
            color=color,
            hatch=hatch,
            edgecolor="white",
            label=f"{name} {share:.1%}",
        )
        if share >= _NARROW:
            axes.text(
                begin + share / 2,
                0,
                f"{share:.0%}",
                ha="center",
                va="center",
                bbox={"boxstyle": "round", "facecolor": "white", "edgecolor": "none"},
            )
        begin += share
    axes.set_title(f"{run.name}: {format_duration(times.total_s)}", fontsize="small", color=GRAY)
    axes.set_xlim(0, 1)
    axes.set_yticks([])
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, fontsize="small", frameon=False)
    return figure
