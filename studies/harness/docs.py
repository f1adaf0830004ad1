"""Writes the tables and figures that a study has in the docs, from committed records."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from paceline.records import Record, RecordStore, latest_per_case
from paceline.reports.plots.style import save_figure
from paceline.reports.tables.table import Table, render_markdown
from studies.harness.study import ROOT, study_parser

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS = ROOT / "results"
TABLES = ROOT / "docs" / "generated"
IMAGES = ROOT / "docs" / "images"

Figures = Mapping[str, "Callable[[], Figure]"]
"""Functions that draw a figure, by its name."""


def read(name: str) -> list[Record]:
    """Returns the newest record of each case of a committed store."""
    return latest_per_case(RecordStore(RESULTS / f"{name}.jsonl").read())


def publish(text: str | None, tables: Callable[[], Mapping[str, Table]], figures: Figures) -> int:
    """Runs a program that writes all tables and figures of some studies.

    Args:
        text: The docstring of the program.
        tables: Returns the tables by name.
        figures: The figures by name.
    """
    study_parser(text, store=None).parse_args()
    for name, table in tables().items():
        (TABLES / f"{name}.md").write_text(render_markdown(table), encoding="utf-8")
    for name, draw in figures.items():
        save_figure(draw(), IMAGES, name)
    return 0
