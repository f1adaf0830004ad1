"""Timelines of pipeline stages: the work of each rank over time, by micro-batch.

Every layout has a panel and every rank a lane. Each piece of work shows the number of its
micro-batch. If a rank has several stages, later stages are darker. White is idle time. The panel
title splits idle time into the measured bubble and the imbalance of the stages, and the bubble into
the cost of the schedule's order and exposed communication (medians over the steps).
"""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from paceline.records import Record
from paceline.records.kinds import PREDICTION
from paceline.reports.plots.style import GRAY, add_grid, blank_figure, subtitle

_PHASES = {
    "forward": ("#9db9dd", "#5f88bd", "#3b6fb6"),
    "loss": ("#c3b3d9",) * 3,
    "backward": ("#a9d1b1", "#6fb17d", "#4c9a5b"),
    "weights": ("#f0d9a0", "#d9b55b", "#b8a13a"),
}
_NAMES = {"weights": "gradients of weights"}
_LANE_INCHES = 0.42
_SMALLEST_LABEL = 0.012
"""Pieces below this share of the axis are too narrow for a label."""


def plot_pipelines(records: Sequence[Record]) -> Figure:
    """Draws one step of every layout with a pipeline."""
    measured = [record for record in records if record.kind != PREDICTION and record.metrics]
    predicted = {record.case["layout"]: record for record in records if record.kind == PREDICTION}
    lanes = [len(_ranks(record)) for record in measured]
    height = _LANE_INCHES * sum(lanes) + 0.8 * len(measured) + 1.3
    figure = blank_figure("What the stages of a pipeline do", (9.0, height))
    panels = figure.subplots(
        len(measured), sharex=True, squeeze=False, gridspec_kw={"height_ratios": lanes}
    )[:, 0]
    end_ms = max(1e3 * _end_s(record) for record in measured)
    for axes, record in zip(panels, measured, strict=True):
        _draw_layout(axes, record, predicted.get(record.case["layout"]), end_ms)
    style = {"fontsize": "x-small", "color": GRAY}
    above = panels[0].transAxes
    panels[0].text(0.0, 1.35, subtitle(measured), style, transform=above, va="bottom")
    darker = "; darker: a later stage of the rank" if any(map(_is_interleaved, measured)) else ""
    panels[-1].set_xlabel(f"time from the first forward (ms){darker}")
    drawn = [
        phase
        for phase in _PHASES
        if any(f"{phase}_start_s" in record.metrics for record in measured)
    ]
    figure.legend(
        handles=[Patch(color=_PHASES[phase][0], label=_NAMES.get(phase, phase)) for phase in drawn],
        loc="outside lower center",
        ncols=len(drawn),
        fontsize="small",
        frameon=False,
    )
    return figure


def _draw_layout(axes: Axes, record: Record, prediction: Record | None, end_ms: float) -> None:
    ranks = _ranks(record)
    for phase in _PHASES:
        _draw_phase(axes, record, phase, {rank: -lane for lane, rank in enumerate(ranks)}, end_ms)
    axes.set_yticks(
        [-lane for lane in range(len(ranks))], [f"rank {rank}" for rank in ranks], fontsize="small"
    )
    axes.set_ylim(0.5 - len(ranks), 0.5)
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
    axes.set_title(title, fontsize="small", loc="left")
    add_grid(axes, "x")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)


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
        colors = _PHASES[phase]
        color = colors[min(int(stage) // len(lanes), len(colors) - 1)]
        piece = (1e3 * start, 1e3 * (end - start))
        lane = lanes[int(rank)]
        axes.broken_barh(
            [piece], (lane - 0.38, 0.76), facecolors=color, edgecolors="white", linewidth=0.5
        )
        if numbers is not None and piece[1] > _SMALLEST_LABEL * end_ms:
            axes.text(
                piece[0] + piece[1] / 2,
                lane,
                f"{numbers.samples[index]:.0f}",
                fontsize=6,
                ha="center",
                va="center",
            )


def _ranks(record: Record) -> list[int]:
    return sorted({int(rank) for rank in record.metrics["forward_rank"].samples})


def _is_interleaved(record: Record) -> bool:
    return max(record.metrics["forward_stage"].samples) >= len(_ranks(record))


def _end_s(record: Record) -> float:
    ends = (record.metrics.get(f"{phase}_end_s") for phase in _PHASES)
    return max(max(metric.samples) for metric in ends if metric is not None)
