"""What all pictures share: size, colours, a subtitle that makes them self-contained, files.

A picture's subtitle holds what all its records share, so that it can be read away from the
page it was made for. Files are reproducible: the same records give the same bytes.
"""

import pathlib
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.records import Record
from paceline.reports.evidence.fields import describe_fields, split_fields

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GRAY = "#444444"
COLORS = ("#3b6fb6", "#d97b29", "#4c9a5b", "#9a4c7a", "#6b6b6b", "#b8a13a")
_SIZE_INCHES = (8.0, 4.8)
_SUBTITLE_CHARACTERS = 110


def new_figure(title: str, records: Sequence[Record]) -> tuple["Figure", "Axes"]:
    """Returns an empty picture with its title, and with what the records share below it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    axes = figure.subplots()
    figure.suptitle(title, fontweight="bold")
    axes.set_title(subtitle(records), fontsize="x-small", color=GRAY)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    return figure, axes


def subtitle(records: Sequence[Record]) -> str:
    """Returns what the records share, in lines that fit below a title."""
    shared, _varying = split_fields(records)
    return textwrap.fill(describe_fields(shared), _SUBTITLE_CHARACTERS)


def save_figure(figure: "Figure", directory: pathlib.Path, name: str) -> list[pathlib.Path]:
    """Writes the figure as PNG and SVG and returns both paths."""
    paths = [directory / f"{name}.{suffix}" for suffix in ("png", "svg")]
    for path in paths:
        save_as(figure, path)
    return paths


def save_as(figure: "Figure", path: pathlib.Path) -> None:
    """Writes the figure in the format of the file's ending, PNG or SVG."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    # Without these, every file would differ from the last by its date and random identifiers.
    unchanging = {"Software": None} if path.suffix == ".png" else {"Date": None}
    with matplotlib.rc_context({"svg.hashsalt": "paceline"}):
        figure.savefig(path, dpi=150, metadata=unchanging)
