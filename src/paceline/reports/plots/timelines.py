"""Timelines of traced steps: compute and messages by strategy, and the stages of a pipeline.

Of a strategy, every rank has two lanes: compute, coloured by phase, and below it messages, numbered
in the order of sending. In gaps of the compute lane, the step waits. Communication in such a gap is
exposed and labelled with its duration in milliseconds.

Of a pipeline, every rank has a lane, and each piece of work shows the number of its micro-batch. If
a rank has several stages, later stages are darker. White is idle time. The panel title splits idle
time into the measured bubble and the imbalance of the stages, and the bubble into the cost of the
schedule's order and exposed communication (medians over the steps).
"""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from paceline.records import Record
from paceline.records.kinds import PREDICTION
from paceline.reports.fields import strategy_text
from paceline.reports.plots.style import COLORS, GRAY, blank_figure, set_lanes, subtitle

_PHASES = {"forward": "#e4e9f0", "backward": "#b9c6d8", "optimizer": "#8fa3bd"}
_MESSAGE_COLORS = COLORS[:4]
_MAX_RANKS = 4
_LANE_INCHES = 0.32
_SMALLEST_LABEL = 0.012
"""Messages and pieces of work below this share of the axis are too narrow for a label."""
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
    panels = _panels(figure, num_lanes)
    for axes, (name, group) in zip(panels, groups.items(), strict=True):
        _draw_strategy(axes, name, group, predicted.get(name), end_ms)
    _add_subtitle(panels[0], measured, 1.25)
    panels[-1].set_xlabel("time from the start of the step (ms)")
    handles = [
        *(Patch(color=color, label=phase) for phase, color in _PHASES.items()),
        Patch(color=_MESSAGE_COLORS[0], label="all-reduce, numbered"),
        Patch(facecolor="white", edgecolor=GRAY, hatch="////", label="all-reduce, predicted"),
    ]
    _add_legend(figure, handles)
    return figure


def _panels(figure: Figure, num_lanes: Sequence[int]) -> list[Axes]:
    ratios = {"height_ratios": num_lanes}
    grid = figure.subplots(len(num_lanes), sharex=True, squeeze=False, gridspec_kw=ratios)
    return list(grid[:, 0])


def _add_legend(figure: Figure, handles: list[Patch]) -> None:
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles),
        fontsize="small",
        frameon=False,
    )


def _add_subtitle(axes: Axes, records: Sequence[Record], height: float) -> None:
    style = {"fontsize": "x-small", "color": GRAY}
    axes.text(0.0, height, subtitle(records), style, transform=axes.transAxes, va="bottom")


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
    step_ms = 1e3 * group[0].metrics["drawn_step_s"].value
    set_lanes(axes, labels, f"{name}: a step of {step_ms:.0f} ms", "x-small")
    axes.set_ylim(-len(labels) + 0.5 - 0.75, 0.6)


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


_PIPELINE_PHASES = {
    "forward": ("#9db9dd", "#5f88bd", "#3b6fb6"),
    "loss": ("#c3b3d9",) * 3,
    "backward": ("#a9d1b1", "#6fb17d", "#4c9a5b"),
    "weights": ("#f0d9a0", "#d9b55b", "#b8a13a"),
}
_NAMES = {"weights": "gradients of weights"}
_STAGE_INCHES = 0.42


def plot_pipelines(records: Sequence[Record]) -> Figure:
    """Draws one step of every layout with a pipeline."""
    measured = [record for record in records if record.kind != PREDICTION and record.metrics]
    predicted = {record.case["layout"]: record for record in records if record.kind == PREDICTION}
    lanes = [len(_ranks(record)) for record in measured]
    height = _STAGE_INCHES * sum(lanes) + 0.8 * len(measured) + 1.3
    figure = blank_figure("What the stages of a pipeline do", (9.0, height))
    panels = _panels(figure, lanes)
    end_ms = max(1e3 * _end_s(record) for record in measured)
    for axes, record in zip(panels, measured, strict=True):
        _draw_layout(axes, record, predicted.get(record.case["layout"]), end_ms)
    _add_subtitle(panels[0], measured, 1.35)
    darker = "; darker: a later stage of the rank" if any(map(_is_interleaved, measured)) else ""
    panels[-1].set_xlabel(f"time from the first forward (ms){darker}")
    handles = [
        Patch(color=colors[0], label=_NAMES.get(phase, phase))
        for phase, colors in _PIPELINE_PHASES.items()
        if any(f"{phase}_start_s" in record.metrics for record in measured)
    ]
    _add_legend(figure, handles)
    return figure


def _draw_layout(axes: Axes, record: Record, prediction: Record | None, end_ms: float) -> None:
    ranks = _ranks(record)
    for phase in _PIPELINE_PHASES:
        _draw_phase(axes, record, phase, {rank: -lane for lane, rank in enumerate(ranks)}, end_ms)
    metrics = record.metrics
    expected = (
        "" if prediction is None else f" (predicted {prediction.metrics['bubble'].value:.1%})"
    )
    title = (
        f"{record.case['layout']}: idle {metrics['idle'].value:.1%} of its work = measured bubble "
        f"{metrics['bubble'].value:.1%}{expected} + imbalance {metrics['imbalance'].value:.1%}\n"
        f"measured bubble = order {metrics['order_bubble'].value:.1%} + messages "
        f"{metrics['messages'].value:.1%}"
    )
    set_lanes(axes, [f"rank {rank}" for rank in ranks], title, "small")
    axes.set_ylim(0.5 - len(ranks), 0.5)


def _draw_phase(
    axes: Axes, record: Record, phase: str, lanes: dict[int, int], end_ms: float
) -> None:
    if f"{phase}_start_s" not in record.metrics:
        return
    columns = [
        record.metrics[f"{phase}_{name}"].samples for name in ("start_s", "end_s", "rank", "stage")
    ]
    numbers = record.metrics.get(f"{phase}_micro_batch")
    for index, (start, end, rank, stage) in enumerate(zip(*columns, strict=True)):
        colors = _PIPELINE_PHASES[phase]
        color = colors[min(int(stage) // len(lanes), len(colors) - 1)]
        piece = (1e3 * start, 1e3 * (end - start))
        lane = lanes[int(rank)]
        axes.broken_barh(
            [piece], (lane - 0.38, 0.76), facecolors=color, edgecolors="white", linewidth=0.5
        )
        if numbers is not None and piece[1] > _SMALLEST_LABEL * end_ms:
            number, middle = f"{numbers.samples[index]:.0f}", piece[0] + piece[1] / 2
            axes.text(middle, lane, number, fontsize=6, ha="center", va="center")


def _ranks(record: Record) -> list[int]:
    return sorted({int(rank) for rank in record.metrics["forward_rank"].samples})


def _is_interleaved(record: Record) -> bool:
    return max(record.metrics["forward_stage"].samples) >= len(_ranks(record))


def _end_s(record: Record) -> float:
    ends = (record.metrics.get(f"{phase}_end_s") for phase in _PIPELINE_PHASES)
    return max(max(metric.samples) for metric in ends if metric is not None)
