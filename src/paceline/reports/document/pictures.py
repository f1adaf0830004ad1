"""Pictures for embedding: self-contained SVG, reproducible byte for byte from the records."""

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
    """Converts a figure to an SVG picture."""
    output = io.BytesIO()
    # Without these settings, dates and random identifiers would make every file different.
    with matplotlib.rc_context({"svg.hashsalt": f"paceline {name}"}):
        figure.savefig(output, format="svg", metadata={"Date": None})
    return Picture(name=name, description=description, svg=output.getvalue())


def _plain(record: Record) -> Record:
    """Escapes dollar signs in names, which matplotlib would parse as the start of a formula."""
    case = {
        field: value.replace("$", r"\$") if isinstance(value, str) else value
        for field, value in record.case.items()
    }
    return msgspec.structs.replace(record, case=case)
