"""Timelines of traced steps of several strategies, each with its prediction below.

Every rank has two lanes: compute, coloured by phase, and below it messages, numbered in the order
of sending. In gaps of the compute lane, the step waits. Communication in such a gap is exposed and
labelled with its duration in milliseconds.
"""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from paceline.records import Record
from paceline.records.kinds import PREDICTION
from paceline.reports.evidence.fields import strategy_text
from paceline.reports.plots.style import COLORS, GRAY, add_grid, blank_figure, subtitle

_PHASES = {"forward": "#e4e9f0", "backward": "#b9c6d8", "optimizer": "#8fa3bd"}
_MESSAGE_COLORS = COLORS[:4]
_MAX_RANKS = 4
_LANE_INCHES = 0.32
_SMALLEST_LABEL = 0.012
"""Messages below this share of the axis are too narrow for a label."""
_SHORTEST_WORK = 0.01
"""Compute spans below this share of a step lie between messages and compute no gradients."""


def plot_timelines(records: Sequence[Record]) -> Figure:
    """Draws the recorded step of every strategy."""
    measured = [record for record in records if record.kind != PREDICTION and record.metrics]
    predicted = {strategy_text(record): record for record in records if record.kind == PREDICTION}
    groups: dict[str, list[Record]] = {}
    for record in measured:
        of_strategy = groups.setdefault(strategy_text(record), [])
        if len(of_strategy) < _MAX_RANKS:
            of_strategy.append(record)
    end_ms = max(1e3 * max(record.metrics["compute_end_s"].samples) for record in measured)
    num_lanes = [2 * len(group) + (name in predicted) for name, group in groups.items()]
    height = _LANE_INCHES * sum(num_lanes) + 0.75 * len(groups) + 1.2
    figure = blank_figure("Where a training step goes, by strategy", (9.0, height))
    panels = figure.subplots(
        len(groups), sharex=True, squeeze=False, gridspec_kw={"height_ratios": num_lanes}
    )[:, 0]
    for axes, (name, group) in zip(panels, groups.items(), strict=True):
        _draw_strategy(axes, name, group, predicted.get(name), end_ms)
    style = {"fontsize": "x-small", "color": GRAY}
    above = panels[0].transAxes
    panels[0].text(0.0, 1.25, subtitle(measured), style, transform=above, va="bottom")
    panels[-1].set_xlabel("time from the start of the step (ms)")
    figure.legend(
        handles=[
            *(Patch(color=color, label=phase) for phase, color in _PHASES.items()),
            Patch(color=_MESSAGE_COLORS[0], label="all-reduce, numbered"),
            Patch(facecolor="white", edgecolor=GRAY, hatch="////", label="all-reduce, predicted"),
        ],
        loc="outside lower center",
        ncols=5,
        fontsize="small",
        frameon=False,
    )
    return figure


def _draw_strategy(
    axes: Axes, name: str, group: Sequence[Record], prediction: Record | None, end_ms: float
) -> None:
    labels: list[str] = []
    for record in group:
        rank = record.case["rank"]
        _draw_compute(axes, -len(labels), record)
        labels.append(f"rank {rank} computes")
        _draw_messages(axes, -len(labels), record, end_ms)
        labels.append(f"rank {rank} sends")
    if prediction is not None:
        _draw_messages(axes, -len(labels), prediction, end_ms, predicted=True)
        labels.append("predicted")
    _mark_exposed(axes, group[0], -len(labels) + 0.38)
    axes.set_yticks([-lane for lane in range(len(labels))], labels, fontsize="x-small")
    axes.set_ylim(-len(labels) + 0.5 - 0.75, 0.6)
    step_ms = 1e3 * group[0].metrics["drawn_step_s"].value
    axes.set_title(f"{name}: a step of {step_ms:.0f} ms", fontsize="small", loc="left")
    add_grid(axes, "x")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _draw_compute(axes: Axes, lane: int, record: Record) -> None:
    metrics = record.metrics
    for phase, color in _PHASES.items():
        if f"{phase}_start_s" not in metrics:
            continue
        first, last = metrics[f"{phase}_start_s"].value, metrics[f"{phase}_end_s"].value
        pieces = [
            (1e3 * max(start, first), 1e3 * (min(end, last) - max(start, first)))
            for start, end in _spans(record, "compute")
            if min(end, last) > max(start, first)
        ]
        axes.broken_barh(pieces, (lane - 0.36, 0.72), facecolors=color)


def _draw_messages(
    axes: Axes, lane: int, record: Record, end_ms: float, *, predicted: bool = False
) -> None:
    if "message_start_s" not in record.metrics:
        return
    free_ms = 0.0
    for number, (start, end) in enumerate(_spans(record, "message")):
        # Two messages may be in flight at once; the later one is drawn from the end of the earlier.
        start_ms, free_ms = max(1e3 * start, free_ms), max(1e3 * end, free_ms)
        color = _MESSAGE_COLORS[number % len(_MESSAGE_COLORS)]
        axes.broken_barh(
            [(start_ms, free_ms - start_ms)],
            (lane - 0.36, 0.72),
            facecolors="white" if predicted else color,
            edgecolors=color if predicted else "white",
            hatch="////" if predicted else None,
            linewidth=0.6,
        )
        if free_ms - start_ms > _SMALLEST_LABEL * end_ms and not predicted:
            style = {"fontsize": 6, "color": "white"}
            middle = (start_ms + free_ms) / 2
            axes.text(middle, lane, str(number), style, ha="center", va="center")


def _spans(record: Record, name: str) -> list[tuple[float, float]]:
    starts, ends = (record.metrics[f"{name}_{side}_s"].samples for side in ("start", "end"))
    return list(zip(starts, ends, strict=True))


def _mark_exposed(axes: Axes, record: Record, height: float) -> None:
    """Marks the span from the last computed gradient to the end of the last message."""
    metrics = record.metrics
    if "message_end_s" not in metrics:
        return
    last = max(metrics["message_end_s"].samples)
    shortest = _SHORTEST_WORK * metrics["drawn_step_s"].value
    ends = [
        end
        for start, end in _spans(record, "compute")
        if end - start > shortest and start < metrics["backward_end_s"].value
    ]
    over = max(ends, default=last)
    arrow = {"arrowstyle": "<->", "color": GRAY, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (1e3 * over, height), (1e3 * last, height), arrowprops=arrow)
    text = f"  exposed: {1e3 * metrics['drawn_exposed_s'].value:.0f} ms"
    axes.text(1e3 * last, height, text, ha="left", va="center", fontsize="x-small")
