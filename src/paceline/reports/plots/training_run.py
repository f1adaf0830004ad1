"""Plots of a training run (loss, speed, phases, memory, summary) and of its dataset."""

import dataclasses
import itertools
import operator
import statistics
from collections.abc import Callable, Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paceline.core.units import format_binary_bytes, format_count, format_duration, format_seconds
from paceline.data.inspect import DocumentLengths
from paceline.predict.history import HistoryEntry
from paceline.records.schema import with_interval
from paceline.reports.plots.style import (
    COLORS,
    GRAY,
    add_grid,
    blank_figure,
    memory_unit,
    set_log_y,
)
from paceline.reports.tables.predictions import between
from paceline.reports.training_run import TrainingRun
from paceline.training.metrics import phase_times, steady_steps

_MEASURED, _PREDICTED, _RESUMED = COLORS[0], COLORS[1], COLORS[3]
_Middle = Callable[[Sequence[float]], float]
"""A function such as mean or median."""
_MOST_POINTS = 600
_SMOOTHED_PARTS = 50
"""A point of a smoothed line averages about 1 / `_SMOOTHED_PARTS` of the run."""


def _run_figure(title: str, run: TrainingRun) -> tuple[Figure, Axes]:
    """Returns an empty figure with the run's name and tokens per step as subtitle."""
    figure = blank_figure(title, (8.0, 4.2))
    axes = figure.subplots()
    tokens = f"{run.expected.tokens_per_step:,} tokens per step"
    axes.set_title(f"{run.name}, {tokens}".replace("$", r"\$"), fontsize="small", color=GRAY)
    add_grid(axes, "y")
    return figure, axes


def _mark_resumptions(axes: Axes, run: TrainingRun, *, has_label: bool = True) -> None:
    """Draws a vertical line at every resumption."""
    for number, step in enumerate(run.resumptions):
        label = "resumed" if has_label and number == 0 else None
        axes.axvline(step, color=_RESUMED, linestyle=":", linewidth=1.2, label=label)


def _draw_held_out(axes: Axes, run: TrainingRun, label: str) -> None:
    """Draws the held-out losses of the evaluations."""
    axes.plot(
        [row.step for row in run.evaluations],
        [row.loss for row in run.evaluations],
        "o-",
        color=_PREDICTED,
        markersize=4,
        linewidth=0.8,
        label=label,
    )


def _thinned(
    positions: Sequence[float], values: Sequence[float], middle: _Middle = statistics.fmean
) -> tuple[list[float], list[float]]:
    """Returns a line of at most `_MOST_POINTS` points, each the `middle` of consecutive values."""
    groups = min(len(values), _MOST_POINTS)
    borders = [number * len(values) // groups for number in range(groups + 1)] if groups else [0]
    spans = list(itertools.pairwise(borders))
    return (
        [statistics.fmean(positions[begin:end]) for begin, end in spans],
        [middle(values[begin:end]) for begin, end in spans],
    )


def _smoothed(
    positions: Sequence[float], values: Sequence[float], middle: _Middle = statistics.fmean
) -> tuple[list[float], list[float]]:
    """Returns a thinned line, smoothed by the `middle` of a window of fixed length."""
    thin_positions, thin_values = _thinned(positions, values, middle)
    reach = max(1, len(thin_values) // (2 * _SMOOTHED_PARTS))
    return thin_positions, [
        middle(thin_values[max(0, position - reach) : position + reach + 1])
        for position in range(len(thin_values))
    ]


_ABOVE = 1.6
"""The step-time axis ends at this multiple of the larger of predicted and measured time."""


def plot_story(run: TrainingRun, step: HistoryEntry, subtitle: str) -> Figure:
    """Draws the step times of a run with their predicted interval, and its loss.

    `step` must have a prediction.
    """
    figure = blank_figure("Planned, trained, compared", (9.0, 3.9))
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_steps(left, run, step)
    _draw_loss(right, run)
    for axes in (left, right):
        _mark_resumptions(axes, run, has_label=False)
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
        color=_MEASURED,
        markersize=3,
        alpha=0.6,
        label=f"measured: {format_seconds(step.measured)} in the median",
    )
    label = f"planned: {format_seconds(predicted.value)}"
    if predicted.low is not None and predicted.high is not None:
        label += f", 90% interval {between(*map(format_seconds, (predicted.low, predicted.high)))}"
        axes.axhspan(1e3 * predicted.low, 1e3 * predicted.high, color=_PREDICTED, alpha=0.2, lw=0)
    axes.axhline(1e3 * predicted.value, color=_PREDICTED, label=label)
    highest = max(predicted.high or predicted.value, step.measured)
    axes.set(ylim=(0, _ABOVE * 1e3 * highest), ylabel="step time (ms)")
    axes.legend(loc="lower center", frameon=False, fontsize="small")


def _draw_loss(axes: Axes, run: TrainingRun) -> None:
    steps, losses = [row.step for row in run.steps], [row.loss for row in run.steps]
    axes.plot(*_smoothed(steps, losses), color=_MEASURED, label="training")
    _draw_held_out(axes, run, "held-out text")
    axes.set_ylabel("loss (nats per token)")
    axes.legend(frameon=False, fontsize="small")


def plot_losses(run: TrainingRun) -> Figure:
    """Draws the training loss, raw and smoothed, the held-out loss and the predicted final loss."""
    figure, axes = _run_figure("Loss", run)
    steps = [row.step for row in run.steps]
    losses = [row.loss for row in run.steps]
    axes.plot(*_thinned(steps, losses), color=_MEASURED, alpha=0.3, linewidth=0.8)
    axes.plot(*_smoothed(steps, losses), color=_MEASURED, label="training, smoothed")
    if run.evaluations:
        _draw_held_out(axes, run, "held-out")
    if (final := run.expected.final_loss) is not None and final.low and final.high:
        axes.errorbar(
            run.expected.num_steps,
            final.value,
            yerr=[[final.value - final.low], [final.high - final.value]],
            color=GRAY,
            fmt="s",
            capsize=6,
            label=f"predicted at the end: {final.value:.3f}",
        )
    _mark_resumptions(axes, run)
    axes.set(ylabel="cross-entropy (nats per token)", xlabel="step")
    axes.legend()
    return figure


def plot_schedule(run: TrainingRun) -> Figure:
    """Draws the learning rate and, below it, the gradient norm."""
    figure = blank_figure("Learning rate and gradients", (8.0, 5.0))
    above, below = figure.subplots(2, sharex=True)
    steps = [row.step for row in run.steps]
    above.plot(*_thinned(steps, [row.learning_rate for row in run.steps]), color=_MEASURED)
    above.set(ylabel="learning rate", ylim=(0, None))
    norms = [row.gradient_norm for row in run.steps]
    below.plot(*_thinned(steps, norms), color=_MEASURED, alpha=0.3, linewidth=0.8)
    below.plot(*_smoothed(steps, norms), color=_MEASURED, label="smoothed")
    below.set_ylabel("norm of the gradients")
    set_log_y(below)
    below.set_xlabel("step")
    for axes in (above, below):
        add_grid(axes, "y")
        _mark_resumptions(axes, run, has_label=axes is below)
    below.legend()
    return figure


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
    figure, axes = _run_figure("Throughput", run)
    expected = run.expected
    steps = [row.step for row in run.steps]
    speeds = [expected.tokens_per_s(row.step_time_s) for row in run.steps]
    # The median, because the time of a step after an evaluation or a checkpoint includes it.
    line = _smoothed(steps, speeds, statistics.median)
    axes.plot(*line, color=_MEASURED, label="median of neighbouring steps")
    if (step := expected.step_time) is not None:
        predicted = expected.tokens_per_s(step.value)
        axes.axhline(predicted, color=_PREDICTED, linestyle="--", label="predicted")
    if expected.peak_flops_per_s is not None and expected.flops_per_step is not None:
        per_token = expected.flops_per_step / expected.tokens_per_step / expected.peak_flops_per_s
        conversions = (partial(operator.mul, per_token), partial(operator.mul, 1 / per_token))
        right = axes.secondary_yaxis("right", functions=conversions)
        right.yaxis.set_major_formatter("{x:.0%}")
        right.set_ylabel("model FLOPs utilization")
    _mark_resumptions(axes, run)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set(ylabel="tokens per second, all ranks", xlabel="step")
    axes.legend(loc="lower right")
    return figure


def plot_step_times(run: TrainingRun) -> Figure:
    """Draws a histogram of step times, with the predicted step time."""
    predicted = run.expected.step_time
    title = "Step time" if predicted is None else "Step time: predicted against measured"
    figure, axes = _run_figure(title, run)
    times = [1e3 * row.step_time_s for row in steady_steps(run.rows) or run.steps]
    median = statistics.median(times)
    # A few stragglers would squeeze all other steps into one bar. The label counts them instead.
    limit = 3 * median
    shown = [time_ms for time_ms in times if time_ms <= limit]
    beyond = len(times) - len(shown)
    label = f"{len(times):,} steps" + (f", {beyond:,} of them beyond the picture" if beyond else "")
    axes.hist(shown, bins=40, color=_MEASURED, alpha=0.7, label=label)
    axes.axvline(median, color=_MEASURED, label=f"median {format_seconds(median / 1e3)}")
    if predicted is not None:
        error = median / 1e3 / predicted.value - 1
        label = f"predicted {with_interval(predicted, format_seconds)}, measured {error:+.0%}"
        axes.axvline(1e3 * predicted.value, color=_PREDICTED, linestyle="--", label=label)
    axes.set(xlabel="step time (ms)", ylabel="steps")
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
    axes.set(xlim=(0, 1), yticks=[])
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, fontsize="small", frameon=False)
    return figure


_FAR = 3.0
"""The axis includes the limit only if it is below this multiple of the largest other value."""


def plot_memory(run: TrainingRun) -> Figure | None:
    """Draws the memory of the first rank, its prediction and its limit; None without data."""
    seen = [(row.step, row.memory_bytes) for row in run.steps if row.memory_bytes is not None]
    if not seen:
        return None
    figure, axes = _run_figure("Memory of the first rank", run)
    expected, most = run.expected, max(num_bytes for _, num_bytes in seen)
    unit, name = memory_unit(most)
    axes.plot(
        *_thinned([step for step, _ in seen], [num_bytes / unit for _, num_bytes in seen]),
        "o-",
        color=_MEASURED,
        markersize=3,
        label=f"in use, at most {format_binary_bytes(most)}",
    )
    predicted = expected.memory_bytes
    if predicted is not None:
        label = f"predicted for its tensors: {format_binary_bytes(predicted)}"
        axes.axhline(predicted / unit, color=_PREDICTED, linestyle="--", label=label)
    limit = expected.memory_limit_bytes
    if limit is not None:
        axes.axhline(
            limit / unit, color=GRAY, linestyle=":", label=f"limit {format_binary_bytes(limit)}"
        )
    # A distant limit would flatten everything else, so it appears only in the legend.
    highest = max(most, predicted or 0)
    near = limit is not None and limit < _FAR * highest
    axes.set(
        ylim=(0, 1.25 * (limit if near and limit is not None else highest) / unit),
        ylabel=f"memory ({name})",
        xlabel="step",
    )
    axes.legend()
    return figure


def plot_document_lengths(lengths: DocumentLengths, what: str, context_length: int) -> Figure:
    """Draws the number of documents of `what` by length in tokens; marks the context length."""
    figure = blank_figure("Documents by length")
    axes = figure.subplots()
    positions = range(len(lengths.counts))
    axes.bar(positions, lengths.counts, width=0.9, color=COLORS[0])
    axes.set_xticks(
        list(positions), [format_count(2**position) for position in positions], rotation=45
    )
    axes.set(xlabel="tokens in the document, from this many to twice as many", ylabel="documents")
    axes.margins(y=0.12)  # Room for the label below.
    axes.set_title(
        f"{what}: {lengths.num_documents:,} documents, {lengths.num_tokens:,} tokens, "
        f"the longest {lengths.longest:,}",
        fontsize="medium",
        color=GRAY,
    )
    if context_length < 2 ** len(lengths.counts):
        # The left edge of a bar stands for its power of two.
        exponent = context_length.bit_length() - 1
        position = exponent + (context_length / 2**exponent - 1) - 0.5
        axes.axvline(position, color=COLORS[1], linestyle="--")
        axes.annotate(
            f"context of {context_length:,}",
            (position, 1),
            xycoords=("data", "axes fraction"),
            xytext=(4, -12),
            textcoords="offset points",
            color=COLORS[1],
        )
    add_grid(axes, "y")
    return figure
