"""Common style of all plots: size, colours, subtitles, output files.

The subtitle lists the case fields that all records share, so that a plot can be understood outside
its page. Files are reproducible: the same records give the same bytes.
"""

import pathlib
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from paceline.core.units import GIB, MIB
from paceline.records import Record
from paceline.reports.fields import describe_fields, split_fields

GRAY = "#444444"
COLORS = ("#3b6fb6", "#d97b29", "#4c9a5b", "#9a4c7a", "#6b6b6b", "#b8a13a")
PHASE_COLORS = {
    "forward": COLORS[0],
    "backward": COLORS[2],
    "exposed communication": COLORS[1],
    "optimizer": COLORS[4],
}
# From permanent to short-lived memory; hatches distinguish neighbours in greyscale.
MEMORY_STYLES = {
    "parameters": ("#30435c", ""),
    "optimizer_state": ("#5b7ba3", "///"),
    "buffers": ("#cfd6df", ""),
    "other": ("#cfd6df", ""),
    "gradients": ("#d97b29", "\\\\\\"),
    "activations": ("#8fbf9a", ""),
    "temporary": ("#f0d26b", "..."),
}
"""Colour and hatch of each memory category."""
_LIGHT_GRAY = "#c9d1d9"
_BACKGROUND = "#0d1117"
_DARK: dict[Any, Any] = {
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), _BACKGROUND),
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), _LIGHT_GRAY),
    **dict.fromkeys(("xtick.color", "ytick.color", "grid.color"), _LIGHT_GRAY),
}
"""Colours of GitHub's dark theme."""
_SIZE_INCHES = (8.0, 4.8)
_SUBTITLE_CHARACTERS = 110


def blank_figure(title: str, size_inches: tuple[float, float] = _SIZE_INCHES) -> Figure:
    """Returns an empty figure with a title."""
    figure = Figure(figsize=size_inches, layout="constrained")
    figure.suptitle(title, fontweight="bold")
    return figure


def add_grid(axes: Axes, axis: Literal["x", "y", "both"]) -> None:
    """Adds faint grid lines behind the data and removes the top and right spines."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=axis, alpha=0.3)
    axes.set_axisbelow(True)


def add_label(
    axes: Axes, text: str, point: tuple[float, float], offset: tuple[float, float], **style: Any
) -> None:
    """Adds a label to a point, at an offset in typographic points."""
    axes.annotate(text, point, offset, textcoords="offset points", **style)


def set_log_y(axes: Axes) -> None:
    """Makes the y axis logarithmic, with plain labels at 1, 2 and 5 even within one decade."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def set_lanes(axes: Axes, labels: Sequence[str], title: str, fontsize: str) -> None:
    """Labels the lanes of a timeline, which lie at 0, -1, -2 and so on, below a title."""
    axes.set_yticks([-lane for lane in range(len(labels))], labels, fontsize=fontsize)
    axes.set_title(title, fontsize="small", loc="left")
    add_grid(axes, "x")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)


def stack_bars(
    axes: Axes,
    positions: Sequence[Any],
    sizes: Mapping[str, Sequence[float]],
    styles: Mapping[str, tuple[str, str]],
    thickness: float,
    *,
    is_vertical: bool = False,
    **style: Any,
) -> list[float]:
    """Draws a bar per position, divided into parts of these sizes, and returns where the bars end.

    Each part has a colour and a hatch, and its name is its label.
    """
    ends = [0.0] * len(positions)
    for name, parts in sizes.items():
        style |= {"color": styles[name][0], "hatch": styles[name][1], "label": name}
        if is_vertical:
            axes.bar(positions, parts, thickness, ends, **style)
        else:
            axes.barh(positions, parts, thickness, ends, **style)
        ends = [end + part for end, part in zip(ends, parts, strict=True)]
    return ends


def new_figure(title: str, records: Sequence[Record]) -> tuple[Figure, Axes]:
    """Returns an empty figure with a title and the shared fields of the records as subtitle."""
    figure = blank_figure(title)
    axes = figure.subplots()
    axes.set_title(subtitle(records), fontsize="x-small", color=GRAY)
    add_grid(axes, "y")
    return figure, axes


def subtitle(records: Sequence[Record]) -> str:
    """Returns the shared fields of the records, wrapped to fit below a title."""
    shared, _varying = split_fields(records)
    return textwrap.fill(describe_fields(shared), _SUBTITLE_CHARACTERS)


def dark(make: Callable[[], Figure]) -> Figure:
    """Returns the figure that `make` draws, in colours for a dark background."""
    with matplotlib.rc_context(_DARK):
        figure = make()
    for artist in figure.findobj(lambda each: hasattr(each, "set_color")):
        color = getattr(artist, "get_color", lambda: None)()
        if isinstance(color, str) and color in (GRAY, "black"):
            artist.set_color(_LIGHT_GRAY)  # type: ignore[attr-defined]
    return figure


def memory_unit(largest_bytes: float) -> tuple[int, str]:
    """Returns the unit of a memory axis in bytes, and its name."""
    return (GIB, "GiB") if largest_bytes >= GIB else (MIB, "MiB")


def save_figure(figure: Figure, directory: pathlib.Path, name: str) -> list[pathlib.Path]:
    """Writes a figure as PNG and SVG and returns both paths."""
    paths = [directory / f"{name}.{suffix}" for suffix in ("png", "svg")]
    for path in paths:
        save_as(figure, path)
    return paths


def save_as(figure: Figure, path: pathlib.Path) -> None:
    """Writes a figure as PNG or SVG, by the file's extension."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without these settings, dates and random identifiers would make every file different.
    unchanging = {"Software": None} if path.suffix == ".png" else {"Date": None}
    with matplotlib.rc_context({"svg.hashsalt": "paceline"}):
        figure.savefig(path, dpi=150, metadata=unchanging)
