"""What all pictures share: size, colours, a subtitle that makes them self-contained, files.

A picture's subtitle holds what all its records share, so that it can be read away from the
page it was made for. Files are reproducible: the same records give the same bytes.
"""

import pathlib
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paceline.core.units import GIB, MIB
from paceline.records import Record
from paceline.reports.evidence.fields import describe_fields, split_fields

GRAY = "#444444"
COLORS = ("#3b6fb6", "#d97b29", "#4c9a5b", "#9a4c7a", "#6b6b6b", "#b8a13a")
PHASE_COLORS = {
    "forward": COLORS[0],
    "backward": COLORS[2],
    "exposed communication": COLORS[1],
    "optimizer": COLORS[4],
}
# From what is always there to what comes and goes; hatches tell neighbours apart in grey.
MEMORY_STYLES = {
    "parameters": ("#30435c", ""),
    "optimizer_state": ("#5b7ba3", "///"),
    "buffers": ("#cfd6df", ""),
    "other": ("#cfd6df", ""),
    "gradients": ("#d97b29", "\\\\\\"),
    "activations": ("#8fbf9a", ""),
    "temporary": ("#f0d26b", "..."),
}
"""The colour and hatch of each part of memory."""
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
    """Returns a picture that has a title and nothing else."""
    figure = Figure(figsize=size_inches, layout="constrained")
    figure.suptitle(title, fontweight="bold")
    return figure


def add_grid(axes: Axes, axis: Literal["x", "y", "both"]) -> None:
    """Draws faint lines behind the data, and no frame above or to the right of it."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=axis, alpha=0.3)
    axes.set_axisbelow(True)


def add_label(
    axes: Axes, text: str, point: tuple[float, float], offset: tuple[float, float], **style: Any
) -> None:
    """Writes what a point is called, at an offset of so many typographic points from it."""
    axes.annotate(text, point, offset, textcoords="offset points", **style)


def new_figure(title: str, records: Sequence[Record]) -> tuple[Figure, Axes]:
    """Returns an empty picture with its title, and with what the records share below it."""
    figure = blank_figure(title)
    axes = figure.subplots()
    axes.set_title(subtitle(records), fontsize="x-small", color=GRAY)
    add_grid(axes, "y")
    return figure, axes


def subtitle(records: Sequence[Record]) -> str:
    """Returns what the records share, in lines that fit below a title."""
    shared, _varying = split_fields(records)
    return textwrap.fill(describe_fields(shared), _SUBTITLE_CHARACTERS)


def dark(make: Callable[[], Figure]) -> Figure:
    """Makes a picture for pages with a dark background."""
    with matplotlib.rc_context(_DARK):
        figure = make()
    for artist in figure.findobj(lambda each: hasattr(each, "set_color")):
        color = getattr(artist, "get_color", lambda: None)()
        if isinstance(color, str) and color in (GRAY, "black"):
            artist.set_color(_LIGHT_GRAY)  # type: ignore[attr-defined]
    return figure


def memory_unit(largest_bytes: float) -> tuple[int, str]:
    """Returns the unit for an axis of memory, and its name."""
    return (GIB, "GiB") if largest_bytes >= GIB else (MIB, "MiB")


def save_figure(figure: Figure, directory: pathlib.Path, name: str) -> list[pathlib.Path]:
    """Writes the figure as PNG and SVG and returns both paths."""
    paths = [directory / f"{name}.{suffix}" for suffix in ("png", "svg")]
    for path in paths:
        save_as(figure, path)
    return paths


def save_as(figure: Figure, path: pathlib.Path) -> None:
    """Writes the figure in the format of the file's ending, PNG or SVG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without these, every file would differ from the last by its date and random identifiers.
    unchanging = {"Software": None} if path.suffix == ".png" else {"Date": None}
    with matplotlib.rc_context({"svg.hashsalt": "paceline"}):
        figure.savefig(path, dpi=150, metadata=unchanging)
