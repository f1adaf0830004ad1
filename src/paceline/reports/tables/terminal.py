"""Fits tables into a terminal without splitting words or figures."""

import itertools
from collections.abc import Iterator, Sequence

from rich.box import SIMPLE
from rich.cells import cell_len
from rich.table import Table as RichTable
from rich.text import Text

NOT_APPLICABLE = "n/a"
_LONGEST_FIGURE = 24
"""Maximum length of a figure with its interval; longer cells are prose and may wrap."""


def fit_columns(
    headers: Sequence[str], rows: Sequence[tuple[str, ...]], width: int
) -> Iterator[RichTable | Text]:
    """Yields one table, or several stacked ones if one would be too wide.

    First, the columns are split over several tables, each of which repeats the key columns. If the
    key columns leave no room for another, the rows are split into runs that fill the same columns,
    and each run is shown without its empty columns. If even that does not fit, it becomes text.
    """
    stacked = _stack(headers, rows, width)
    if stacked is not None:
        yield from stacked
        return
    for filled, group in itertools.groupby(rows, _filled_columns):
        chosen = tuple(itertools.compress(headers, filled))
        cells = [tuple(itertools.compress(row, filled)) for row in group]
        yield from _stack(chosen, cells, width) or (_written_out(chosen, cells),)


def _filled_columns(row: Sequence[str]) -> tuple[bool, ...]:
    return tuple(cell != NOT_APPLICABLE for cell in row)


def _stack(
    headers: Sequence[str], rows: Sequence[tuple[str, ...]], width: int
) -> list[RichTable] | None:
    """Returns stacked tables that cover all columns, or None if one column does not fit.

    Every table begins with the key columns: the leading ones that distinguish all rows.
    """
    num_columns = len(headers)
    num_keys = min(1, num_columns - 1)
    while num_keys < num_columns - 1 and len({row[:num_keys] for row in rows}) < len(rows):
        num_keys += 1
    stacked = []
    start = num_keys
    while start < num_columns:
        for end in range(num_columns, start, -1):
            # The first table has every row, the others only rows with a value.
            shown_rows = [
                row[:num_keys] + row[start:end]
                for row in rows
                if start == num_keys or any(_filled_columns(row[start:end]))
            ]
            shown_headers = [*headers[:num_keys], *headers[start:end]]
            fitted = _side_by_side(shown_headers, shown_rows, width)
            if fitted is not None:
                break
        else:
            return None
        stacked.append(fitted)
        start = end
    return stacked


def _unbroken(cell: str) -> list[str]:
    """Returns the unbreakable parts of a cell: a figure with its spread, or the words of prose."""
    return [cell] if len(cell) <= _LONGEST_FIGURE else cell.split()


def _side_by_side(
    headers: Sequence[str], rows: Sequence[Sequence[str]], width: int
) -> RichTable | None:
    """Returns a table wide enough for the longest word of each column; None if it does not fit."""
    columns = list(zip(headers, *rows, strict=True))
    longest_words = []
    for header, *cells in columns:
        words = [*header.split(), *itertools.chain.from_iterable(map(_unbroken, cells))]
        longest_words.append(max(map(cell_len, words), default=0))
    widths = [max(map(cell_len, cells)) for cells in columns]
    # Two spaces separate columns, and there is one space at either end.
    available = width - 2 * len(columns)
    if sum(longest_words) > available:
        return None
    while sum(widths) > available:
        slack = [most - least for most, least in zip(widths, longest_words, strict=True)]
        widths[slack.index(max(slack))] -= 1
    rendered = RichTable(box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    for header, column_width in zip(headers, widths, strict=True):
        rendered.add_column(Text(header), width=column_width)
    for row in rows:
        rendered.add_row(*(Text(cell) for cell in row))
    return rendered


def _written_out(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Text:
    """Returns each row as a paragraph of headers and cells."""
    return Text(
        "\n\n".join(
            "; ".join(f"{header}: {cell}" for header, cell in zip(headers, row, strict=True))
            for row in rows
        )
    )
