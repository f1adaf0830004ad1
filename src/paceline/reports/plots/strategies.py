"""Plots of strategies: step time, exposed communication, collectives, and a diagram of overlap."""

import statistics
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paceline.accounting.overlap import simulate_buckets
from paceline.core.units import GB, MIB
from paceline.records import Record
from paceline.records.kinds import PREDICTION
from paceline.records.links import find_link, is_loopback
from paceline.reports.fields import case_number, split_fields, split_series, strategy_case
from paceline.reports.plots.style import (
    COLORS,
    GRAY,
    PHASE_COLORS,
    blank_figure,
    new_figure,
    set_log_y,
    stack_bars,
)
from paceline.reports.record_sets import EXPOSED

_SAMPLES_WITH_QUARTILES = 4


def plot_strategies(records: Sequence[Record]) -> Figure:
    """Draws a bar per strategy, divided into phases."""
    chosen = [record for record in records if record.kind != PREDICTION and record.metrics]
    figure, axes = new_figure("One training step by strategy", chosen)
    _shared, varying = split_fields(chosen)
    figure.set_figheight(1.8 + 0.32 * len(chosen))
    positions = range(len(chosen))
    widths = {}
    for name in PHASE_COLORS:
        metric = EXPOSED if name == "exposed communication" else f"{name}_time_s"
        # Strategies that all-gather parameters do not separate communication from backward.
        known = [record.metrics.get(metric) for record in chosen]
        widths[name] = [0.0 if value is None else value.value * 1e3 for value in known]
    styles = {name: (color, "") for name, color in PHASE_COLORS.items()}
    stack_bars(axes, positions, widths, styles, 0.7)
    axes.set_yticks(positions, [strategy_case(record, varying) for record in chosen])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("time (ms), median of each phase")
    figure.legend(fontsize="small", loc="outside lower center", ncols=4)
    return figure


def plot_bucket_size(records: Sequence[Record]) -> Figure:
    """Draws exposed communication by bucket size: measured, predicted, and sqrt(s w o)."""
    from paceline.accounting.overlap import balanced_bucket_bytes

    sized = [
        record for record in records if isinstance(record.case.get("bucket_size_mb"), int | float)
    ]
    measured = [record for record in sized if record.kind != PREDICTION and record.metrics]
    # A store may hold other predictions for the same steps that have only a step time.
    predicted = [
        record for record in sized if record.kind == PREDICTION and EXPOSED in record.metrics
    ]
    figure, axes = new_figure("Exposed communication by bucket size", measured)
    axes.set_xscale("log")
    for index, (name, chosen) in enumerate(split_series(measured, "bucket_size_mb").items()):
        axes.errorbar(
            [case_number(record, "bucket_size_mb") for record in chosen],
            [record.metrics[EXPOSED].value * 1e3 for record in chosen],
            yerr=list(zip(*(_distances_to_quartiles(record) for record in chosen), strict=True)),
            fmt="o-",
            ms=5,
            capsize=3,
            color=COLORS[index % len(COLORS)],
            label=f"{name}: measured, median and quartiles",
        )
    if predicted:
        predicted.sort(key=lambda record: case_number(record, "bucket_size_mb"))
        axes.plot(
            [case_number(record, "bucket_size_mb") for record in predicted],
            [record.metrics[EXPOSED].value * 1e3 for record in predicted],
            "--",
            color=GRAY,
            label="ddp: predicted by the recurrence",
        )
        metrics = predicted[0].metrics
        if "algorithm_bandwidth_bytes_per_s" in metrics:
            best = balanced_bucket_bytes(
                total_bytes=metrics["gradient_bytes"].value,
                bytes_per_s=metrics["algorithm_bandwidth_bytes_per_s"].value,
                latency_s=metrics["latency_s"].value,
            )
            label = f"sqrt(s w o) = {best / MIB:.2g} MiB"
            axes.axvline(best / MIB, color=COLORS[3], linestyle=":", label=label)
    axes.set(xlabel="bucket size (MiB)", ylabel="exposed communication (ms)", ylim=(0, None))
    figure.legend(fontsize="small", loc="outside lower center", ncols=2)
    return figure


def _distances_to_quartiles(record: Record) -> tuple[float, float]:
    metric = record.metrics[EXPOSED]
    if len(metric.samples) < _SAMPLES_WITH_QUARTILES:
        return 0.0, 0.0
    low, median, high = statistics.quantiles(metric.samples, n=4)
    return (median - low) * 1e3, (high - median) * 1e3


_ROOM = 2.0
"""Factor by which the y axis is extended at both ends, so that small differences look small."""


def plot_communication(records: Sequence[Record]) -> Figure:
    """Draws algorithm bandwidth by message size, with the ceiling from the link's line rate."""
    from paceline.accounting.collectives import bus_factor

    figure, axes = new_figure("Throughput of collectives", records)
    axes.set_xscale("log")
    set_log_y(axes)
    has_line_rate = False
    for index, (name, chosen) in enumerate(split_series(records, "size_bytes").items()):
        color = COLORS[index % len(COLORS)]
        sizes = [case_number(record, "size_bytes") for record in chosen]
        metric = "algorithm_bandwidth_bytes_per_s"
        bandwidths = [record.metrics[metric].value / GB for record in chosen]
        axes.plot(sizes, bandwidths, "o-", color=color, label=name, ms=4)
        case = chosen[0].case
        link = find_link(case)
        factor = float(bus_factor(case["operation"], case_number(chosen[0], "world_size")))  # type: ignore[arg-type]
        has_line_rate = has_line_rate or link is not None
        # A single rank sends nothing, so no link limits it.
        if link is not None and factor > 0:
            ceiling = link.bytes_per_s / factor / GB
            ends = [sizes[0], sizes[-1]]
            axes.plot(ends, [ceiling] * 2, "--", color=color, label=f"{name}: line rate")
    if not has_line_rate:
        all_loopback = all(is_loopback(record.case) for record in records)
        reason = "loopback: no line rate" if all_loopback else "no line rate is known"
        text = f"{reason}, so no theoretical curve"
        inside = axes.transAxes
        axes.text(0.02, 0.98, text, transform=inside, va="top", fontsize="small", color=GRAY)
    low, high = axes.get_ylim()
    axes.set(
        ylim=(low / _ROOM, high * _ROOM),
        xlabel="message size (bytes)",
        ylabel="algorithm bandwidth (GB/s)",
    )
    # Outside the axes, because curves may lie anywhere inside.
    figure.legend(fontsize="small", loc="outside lower center", ncols=2)
    return figure


_COMPUTE_COLOR = "#c9d3df"
_NUM_LAYERS = 8
# Fixed time per message, and time per layer in it, in units of one layer's backward.
_MESSAGE_TIME, _LAYER_TIME = 0.8, 0.4


def plot_designs() -> Figure:
    """Draws four strategies for a model of eight equal layers, simulated by the recurrence."""
    layers = list(range(_NUM_LAYERS, 0, -1))
    singles = [[layer] for layer in layers]
    buckets = [[8], [7, 6], [5, 4], [3, 2], [1]]
    designs = {
        "naive: one message per parameter, one by one, when backward is over": (singles, False),
        "flat: one message, when backward is over": ([layers], False),
        "overlapped: one message per parameter, as soon as it is complete": (singles, True),
        "ddp: one message per bucket; the first and the last are small": (buckets, True),
    }
    figure = blank_figure("Four ways to average gradients", (8.0, 7.2))
    panels = figure.subplots(len(designs), sharex=True)
    for axes, (title, (messages, early)) in zip(panels, designs.items(), strict=True):
        axes.set_title(title, fontsize="small", loc="left")
        for start, layer in enumerate(layers):
            _draw_span(axes, 1.0, start, start + 1, f"layer {layer}", _COMPUTE_COLOR)
        _draw_messages(axes, messages, early=early)
        axes.set_yticks([1.0, 0.0], ["backward", "communication"], fontsize="small")
        axes.set_ylim(-1.15, 1.5)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    axes.set_xlabel("time, in units of one layer's backward")
    return figure


def _draw_messages(axes: Axes, messages: Sequence[Sequence[int]], *, early: bool) -> None:
    """Draws the messages and marks the exposed time after the end of backward."""
    ready = [_NUM_LAYERS + 1 - min(message) if early else _NUM_LAYERS for message in messages]
    seconds = [_MESSAGE_TIME + _LAYER_TIME * len(message) for message in messages]
    timeline = simulate_buckets(ready, seconds, _NUM_LAYERS)
    spans = zip(messages, timeline.start_s, timeline.finish_s, strict=True)
    for index, (message, start, end) in enumerate(spans):
        label = str(message[0]) if len(message) == 1 else f"{message[0]}-{message[-1]}"
        _draw_span(axes, 0.0, start, end, label, COLORS[index % len(COLORS)])
    end = max(_NUM_LAYERS, *timeline.finish_s)
    axes.axvline(_NUM_LAYERS, color=GRAY, linestyle=":", linewidth=1)
    arrow = {"arrowstyle": "<->", "color": GRAY, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (_NUM_LAYERS, -0.62), (end, -0.62), arrowprops=arrow)
    middle = (_NUM_LAYERS + end) / 2
    axes.text(middle, -0.68, "exposed", ha="center", va="top", fontsize="x-small")


def _draw_span(axes: Axes, lane: float, start: float, end: float, label: str, color: str) -> None:
    axes.barh(lane, end - start, 0.7, start, color=color, edgecolor="white", linewidth=1)
    axes.text((start + end) / 2, lane, label, ha="center", va="center", fontsize=7)
