"""Diagram of backward and communication on a common time axis."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paceline.accounting.overlap import simulate_buckets
from paceline.reports.plots.style import COLORS, GRAY, blank_figure

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
        "bucketed: one message per bucket; the first and the last are small": (buckets, True),
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
