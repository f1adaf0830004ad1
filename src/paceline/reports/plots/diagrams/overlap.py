"""Backward above communication on one axis of time."""

import dataclasses
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paceline.accounting.communication.overlap_simulator import simulate_buckets
from paceline.reports.plots.style import COLORS, GRAY, blank_figure

_COMPUTE_COLOR = "#c9d3df"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Span:
    """Something that takes from one moment to another."""

    start: float
    end: float
    label: str
    group: int = 0
    """Spans of one group have one colour."""


def draw_lanes(
    axes: Axes, *, title: str, compute: Sequence[Span], communication: Sequence[Span]
) -> None:
    """Draws two lanes and marks what communication takes after the end of computing."""
    for span in compute:
        _draw_span(axes, 1.0, span, _COMPUTE_COLOR)
    for span in communication:
        _draw_span(axes, 0.0, span, COLORS[span.group % len(COLORS)])
    over = compute[-1].end
    end = max([over, *(span.end for span in communication)])
    axes.axvline(over, color=GRAY, linestyle=":", linewidth=1)
    axes.annotate(
        "",
        (over, -0.62),
        (end, -0.62),
        arrowprops={"arrowstyle": "<->", "color": GRAY, "shrinkA": 0, "shrinkB": 0},
    )
    axes.text((over + end) / 2, -0.68, "exposed", ha="center", va="top", fontsize="x-small")
    axes.set_yticks([1.0, 0.0], ["backward", "communication"], fontsize="small")
    axes.set_ylim(-1.15, 1.5)
    axes.set_title(title, fontsize="small", loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _draw_span(axes: Axes, lane: float, span: Span, color: str) -> None:
    axes.barh(
        lane,
        span.end - span.start,
        left=span.start,
        height=0.7,
        color=color,
        edgecolor="white",
        linewidth=1,
    )
    axes.text((span.start + span.end) / 2, lane, span.label, ha="center", va="center", fontsize=7)


def plot_designs() -> Figure:
    """Draws the four containers for a model of eight equal layers, as the recurrence plays them."""
    num_layers, line, call = 8, 0.4, 0.8
    layers = list(range(num_layers, 0, -1))
    compute = [
        Span(start=index, end=index + 1, label=f"layer {layer}")
        for index, layer in enumerate(layers)
    ]
    singles = [[layer] for layer in layers]
    designs = {
        "naive: one message per parameter, one by one, when backward is over": (singles, False),
        "flat: one message, when backward is over": ([layers], False),
        "overlapped: one message per parameter, as soon as it is complete": (singles, True),
        "bucketed: one message per bucket; the first and the last are small": (
            [[8], [7, 6], [5, 4], [3, 2], [1]],
            True,
        ),
    }
    figure = blank_figure("Four ways to average gradients", (8.0, 7.2))
    for axes, (title, (messages, early)) in zip(
        figure.subplots(len(designs), sharex=True), designs.items(), strict=True
    ):
        ready = [num_layers + 1 - min(message) if early else num_layers for message in messages]
        seconds = [call + line * len(message) for message in messages]
        timeline = simulate_buckets(ready, seconds, num_layers)
        communication = [
            Span(start=start, end=end, label=_layers_text(message), group=index)
            for index, (message, start, end) in enumerate(
                zip(messages, timeline.start_s, timeline.finish_s, strict=True)
            )
        ]
        draw_lanes(axes, title=title, compute=compute, communication=communication)
    axes.set_xlabel("time, in units of one layer's backward")
    return figure


def _layers_text(layers: Sequence[int]) -> str:
    return str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"
