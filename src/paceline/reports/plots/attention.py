"""Plots of attention by sequence length, on log axes, and a diagram of FlashAttention's tiles.

A single implementation has one set of axes with a line per case. Several implementations are
compared in panels, one per head dim and dtype; each implementation has a fixed colour.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from paceline.core.specs import AttentionKind
from paceline.core.units import MIB
from paceline.records import Record
from paceline.reports.fields import case_number, describe_case, split_fields, split_series
from paceline.reports.plots.style import COLORS, GRAY, add_grid, blank_figure, new_figure, subtitle

_LINES: tuple[tuple[str, Literal["-", "--"]], ...] = (("o", "-"), ("s", "--"))
"""Marker and line style of each metric."""
_MARKER_SIZE = 4.0
_IMPLEMENTATION_COLORS = dict(zip(get_args(AttentionKind), COLORS, strict=False))
# Implementations that store no scores may save exactly the same bytes. Different marker sizes keep
# all of them visible.
_MARKER_SIZES: dict[AttentionKind, float] = {"tiled": 7.0, "sdpa": 4.5, "triton": 2.5}
_MOST_COLUMNS = 4
_PANEL_INCHES = (3.0, 2.6)
_LEGEND_INCHES = 1.7
_SMALLEST_WIDTH_INCHES = 8.0
_LENGTHS_SIDE_BY_SIDE = 5
"""With more lengths than this, tick labels are vertical."""
_MARK_HEIGHT = 0.05
"""Height of a row of marks for failed cases, as a share of the panel."""


class _Quantity(NamedTuple):
    """Two metrics on a common axis."""

    name: str
    metrics: dict[str, str]
    """Metrics by label; the first is drawn solid, the second dashed."""
    scale: float
    """Factor from the unit of the metrics to that of the axis."""
    unit: str


_TIMES = {"forward": "forward_time_s", "backward": "backward_time_s"}
_SIZES = {"saved for backward": "saved_for_backward_bytes", "peak": "peak_bytes"}
TIME = _Quantity("time", _TIMES, scale=1e3, unit="ms")
MEMORY = _Quantity("memory", _SIZES, scale=1 / MIB, unit="MiB")


def plot_attention(quantity: _Quantity, records: Sequence[Record]) -> Figure:
    """Draws time (forward, backward) or memory (saved for backward, peak) by sequence length."""
    implementations = {record.case["implementation"] for record in records}
    if len(implementations) > 1:
        return _plot_panels(quantity, records)
    name = "Attention that stores its scores" if implementations == {"naive"} else "Attention"
    figure, axes = new_figure(f"{name}: {quantity.name}", records)
    for index, (name, chosen) in enumerate(split_series(records, "context").items()):
        _draw_line(axes, chosen, quantity, COLORS[index % len(COLORS)], name)
    _set_length_axis(axes, records)
    axes.set(xlabel="sequence length (tokens)", ylabel=f"{quantity.name} ({quantity.unit})")
    unmeasured = {
        case_number(record, "context"): record.outcome.replace("_", " ")
        for record in records
        if not record.metrics
    }
    for length, outcome in unmeasured.items():
        axes.axvline(length, color="#aa3333", alpha=0.4, linestyle=":")
        upwards = {"rotation": 90, "color": "#aa3333", "fontsize": "small"}
        across = axes.get_xaxis_transform()
        axes.text(length, 0.02, f"{outcome} ", upwards, ha="right", va="bottom", transform=across)
    axes.legend(fontsize="x-small", ncols=2, loc="upper left")
    return figure


def _draw_line(
    axes: Axes,
    chosen: Sequence[Record],
    quantity: _Quantity,
    color: str,
    name: str,
    marker_size: float = _MARKER_SIZE,
) -> None:
    """Draws a line per metric; `chosen` must be sorted by length."""
    for (marker, dashes), (label, metric) in zip(_LINES, quantity.metrics.items(), strict=True):
        axes.plot(
            [case_number(record, "context") for record in chosen],
            [record.metrics[metric].value * quantity.scale for record in chosen],
            marker=marker,
            linestyle=dashes,
            color=color,
            label=f"{label}, {name}",
            ms=marker_size,
        )


def _set_length_axis(axes: Axes, records: Sequence[Record]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    lengths = sorted({case_number(record, "context") for record in records})
    axes.set_xticks(lengths, [f"{length:,.0f}" for length in lengths])
    axes.set_xlim(lengths[0] / 1.3, lengths[-1] * 1.3)


def _plot_panels(quantity: _Quantity, records: Sequence[Record]) -> Figure:
    panels = _split_panels(records)
    num_widths = len({record.case["head_dim"] for record in records})
    # One column per head dim, so that dtypes are rows. With one head dim, one column per panel.
    num_columns = min(_MOST_COLUMNS, num_widths if num_widths > 1 else len(panels))
    num_rows = -(-len(panels) // num_columns)
    width = max(_SMALLEST_WIDTH_INCHES, _LEGEND_INCHES + _PANEL_INCHES[0] * num_columns)
    size = (width, 1.6 + _PANEL_INCHES[1] * num_rows)
    figure = blank_figure(f"Attention: {quantity.name}", size)
    grid = figure.subplots(num_rows, num_columns, sharex=True, sharey=True, squeeze=False)
    for axes, (name, chosen) in zip(grid.flat, panels.items(), strict=False):
        axes.set_title(name, fontsize="small", loc="left")
        _set_length_axis(axes, records)
        _draw_panel(axes, chosen, quantity)
        add_grid(axes, "y")
    _mark_unmeasured(list(grid.flat), list(panels.values()))
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel(f"{quantity.name} ({quantity.unit})")
    crowded = len({record.case["context"] for record in records}) > _LENGTHS_SIDE_BY_SIDE
    for column in range(num_columns):
        lowest = grid[(len(panels) - 1 - column) // num_columns, column]
        lowest.set_xlabel("sequence length (tokens)", fontsize="small")
        rotation = 90 if crowded else 0
        lowest.tick_params(axis="x", labelbottom=True, rotation=rotation, labelsize="x-small")
    _add_legend(figure, records, list(quantity.metrics))
    figure.supxlabel(subtitle(records), fontsize="x-small", color=GRAY)
    return figure


def _split_panels(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Groups records by the varying key fields other than length and implementation."""
    _shared, varying = split_fields(records)
    join_key = records[0].measured_kind.join_key
    within = ("context", "implementation")
    apart = [field for field in varying if field in join_key and field not in within]
    panels: dict[str, list[Record]] = {}
    for record in records:
        name = describe_case(record, apart) if apart else ""
        panels.setdefault(name, []).append(record)
    return panels


def _draw_panel(axes: Axes, records: Sequence[Record], quantity: _Quantity) -> None:
    ordered = sorted(records, key=lambda record: case_number(record, "context"))
    for name, color in _IMPLEMENTATION_COLORS.items():
        measured = [
            record for record in ordered if record.metrics and record.case["implementation"] == name
        ]
        size = _MARKER_SIZES.get(name, _MARKER_SIZE)
        _draw_line(axes, measured, quantity, color, name, size)


def _mark_unmeasured(grid: Sequence[Axes], panels: Sequence[Sequence[Record]]) -> None:
    """Marks failed cases along the top, with a row per implementation that has any.

    The panels share the y axis, so extending one extends all.
    """
    missing = [[record for record in records if not record.metrics] for records in panels]
    present = {record.case["implementation"] for records in missing for record in records}
    names = [name for name in _IMPLEMENTATION_COLORS if name in present]
    low, high = grid[0].get_ylim()
    grid[0].set_ylim(low, low * (high / low) ** (1 / (1 - _MARK_HEIGHT * len(names))))
    for axes, records in zip(grid, missing, strict=False):
        for index, name in enumerate(names):
            lengths = [
                case_number(record, "context")
                for record in records
                if record.case["implementation"] == name
            ]
            heights = [1 - _MARK_HEIGHT * (index + 0.5)] * len(lengths)
            color, across = _IMPLEMENTATION_COLORS[name], axes.get_xaxis_transform()
            axes.plot(lengths, heights, "x", color=color, ms=4, transform=across)


def _add_legend(figure: Figure, records: Sequence[Record], labels: Sequence[str]) -> None:
    """Adds one legend for the colours, line styles and crosses of all panels."""
    present = {record.case["implementation"] for record in records}
    handles = [
        Line2D([], [], color=color, linewidth=4, label=name)
        for name, color in _IMPLEMENTATION_COLORS.items()
        if name in present
    ]
    handles += [
        Line2D([], [], color=GRAY, marker=marker, linestyle=dashes, ms=4, label=label)
        for (marker, dashes), label in zip(_LINES, labels, strict=True)
    ]
    outcomes = dict.fromkeys(
        record.outcome.replace("_", " ") for record in records if not record.metrics
    )
    if outcomes:
        label = "\nor ".join(outcomes)
        handles.append(Line2D([], [], color=GRAY, marker="x", linestyle="", ms=4, label=label))
    figure.legend(handles=handles, fontsize="small", loc="outside right center")


_LENGTH = 30
_BLOCK = 4
_UNMASKED, _MASKED, _LEFT_OUT = COLORS[0], COLORS[1], "#eef1f4"


def plot_tiles() -> Figure:
    """Draws the causal scores of 30 tokens in 4 x 4 tiles, and one program of each kind."""
    figure = blank_figure("FlashAttention-2: the tiles that are computed", (9.0, 5.5))
    by_queries, by_keys = figure.subplots(1, 2)
    _draw_tiles(by_queries, "forward and dQ: a program owns queries and walks over keys")
    _draw_tiles(by_keys, "dK and dV: a program owns keys and walks over queries")
    middle = _BLOCK / 2
    fifth, third = 4 * _BLOCK, 2 * _BLOCK
    _draw_walk(by_queries, (0.5, fifth + middle), (fifth + _BLOCK - 0.5, fifth + middle))
    _draw_walk(by_keys, (third + middle, third + 0.5), (third + middle, _LENGTH - 0.5))
    patches = [
        Patch(facecolor=_UNMASKED, label="every query sees every key: no mask"),
        Patch(facecolor=_MASKED, label="cut by the diagonal or the end: masked"),
        Patch(facecolor=_LEFT_OUT, edgecolor=GRAY, label="not visited"),
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False)
    return figure


def _draw_tiles(axes: Axes, title: str) -> None:
    for first_query in range(0, _LENGTH, _BLOCK):
        last_query = min(first_query + _BLOCK, _LENGTH) - 1
        for first_key in range(0, _LENGTH, _BLOCK):
            last_key = first_key + _BLOCK - 1
            color = _LEFT_OUT
            if last_key <= first_query:
                color = _UNMASKED
            elif first_key <= last_query:
                color = _MASKED
            width = min(last_key, _LENGTH - 1) - first_key + 1
            height = last_query - first_query + 1
            axes.add_patch(
                Rectangle((first_key, first_query), width, height, facecolor=color, edgecolor="w")
            )
    axes.plot([0, _LENGTH], [0, _LENGTH], color=GRAY, linewidth=1, linestyle=":")
    axes.set(xlim=(-0.5, _LENGTH + 0.5), ylim=(_LENGTH + 0.5, -0.5))
    axes.set_aspect("equal")
    axes.set_title(title, fontsize="small")
    axes.set(xlabel="keys (position)", ylabel="queries (position)")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_walk(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    arrow = {"arrowstyle": "-|>", "color": "white", "linewidth": 2.5}
    axes.annotate("", xy=end, xytext=start, arrowprops=arrow)
