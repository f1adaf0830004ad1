"""Tests that every table of the manual fits 80 and 120 columns, with nothing cut or split."""

import io
import itertools
import pathlib
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from paceline.reports.tables.table import Table

GENERATED = pathlib.Path(__file__).parents[4] / "docs" / "generated"
_LONGEST_WORD = 30
"""Longer words are addresses and paths, which a terminal may break."""


def _tables(path: pathlib.Path) -> list[Table]:
    lines = path.read_text(encoding="utf-8").splitlines()
    groups = itertools.groupby(lines, lambda line: line.startswith("|"))
    tables = []
    for is_table, group in groups:
        if is_table:
            headers, _rule, *rows = ([cell.strip() for cell in _cells(line)] for line in group)
            cells = tuple(tuple(row) for row in rows)
            tables.append(Table(headers=tuple(headers), rows=cells, caption=path.stem))
    return tables


def _cells(line: str) -> list[str]:
    return re.split(r"(?<!\\)\|", line.strip())[1:-1]


def _rendered(table: Table, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    "path",
    # The courses' page is prose, and no command prints its tables.
    [path for path in sorted(GENERATED.glob("*.md")) if _tables(path) and path.stem != "course"],
    ids=lambda path: path.stem,
)
def test_a_table_of_the_manual_fits(path: pathlib.Path, width: int) -> None:
    for table in _tables(path):
        shown = _rendered(table, width)
        assert max(map(cell_len, shown.splitlines())) <= width
        words = {
            word for row in (table.headers, *table.rows) for cell in row for word in cell.split()
        }
        found = set(shown.split())
        assert {word for word in words if len(word) <= _LONGEST_WORD} <= found
