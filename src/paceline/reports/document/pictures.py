"""Drawings as they are put into a page: complete SVG, the same bytes for the same records."""

import io
from collections.abc import Sequence

import matplotlib
import msgspec
from matplotlib.figure import Figure

from paceline.records import Record
from paceline.reports.document.model import Picture
from paceline.reports.plots.registry import draw


def draw_picture(plot: str, records: Sequence[Record], name: str, description: str) -> Picture:
    """Draws one of `paceline.reports.plots.registry.PLOTS`."""
    return picture_of(draw(plot, [_plain(record) for record in records]), name, description)


def picture_of(figure: Figure, name: str, description: str) -> Picture:
    """Turns a figure into SVG."""
    output = io.BytesIO()
    # Without these, every drawing would differ from the last by its date and its identifiers.
    with matplotlib.rc_context({"svg.hashsalt": f"paceline {name}"}):
        figure.savefig(output, format="svg", metadata={"Date": None})
    return Picture(name=name, description=description, svg=output.getvalue())


def _plain(record: Record) -> Record:
    """Keeps a dollar sign in a name from beginning a formula, which may not even be one."""
    case = {
        field: value.replace("$", r"\$") if isinstance(value, str) else value
        for field, value in record.case.items()
    }
    return msgspec.structs.replace(record, case=case)
