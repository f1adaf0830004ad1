"""Tables for people (Markdown, terminal) and for programs (CSV).

A table for people has a column per varying case field; its caption lists the shared ones. In a
terminal, it is fitted to the width without splitting words or figures. CSV is flat and raw: every
case field, and value and standard deviation of every metric.
"""

import csv
import dataclasses
import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from rich.box import SIMPLE
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from paceline.core.errors import UsageError
from paceline.core.units import printable
from paceline.records import CaseValue, Record
from paceline.reports.fields import (
    describe_case,
    describe_fields,
    field_label,
    field_text,
    single_kind,
    split_fields,
    without_directories,
)
from paceline.reports.tables.columns import COLUMNS, UNSTEADY, Column, View

_Item = TypeVar("_Item")
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


_UNSTEADY_NOTE = (
    f"{UNSTEADY} The samples deviate by more than the time itself: take more of them, after more "
    "warm-up, on a quieter machine."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """Headers and rows of text."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str
    notes: tuple[str, ...] = ()
    """Reasons for missing numbers, and warnings about unreliable ones."""

    def __post_init__(self) -> None:
        # Names in records and of files may come from elsewhere.
        clean = tuple(tuple(printable(cell) for cell in row) for row in self.rows)
        object.__setattr__(self, "rows", clean)
        object.__setattr__(self, "caption", printable(self.caption))
        object.__setattr__(self, "notes", tuple(printable(note) for note in self.notes))

    @classmethod
    def of(
        cls,
        items: Iterable[_Item],
        columns: Mapping[str, Callable[[_Item], object]],
        *,
        caption: str,
        notes: Sequence[str] = (),
    ) -> "Table":
        """Returns a table with a row per item; a column is a header and the cell of an item."""
        return cls(
            headers=tuple(columns),
            rows=tuple(tuple(str(cell(item)) for cell in columns.values()) for item in items),
            caption=caption,
            notes=tuple(notes),
        )

    def without_directories(self) -> "Table":
        """Returns the table for a page that is shared, which names files but not where they lie."""
        return dataclasses.replace(
            self,
            rows=tuple(tuple(without_directories(cell) for cell in row) for row in self.rows),
            notes=tuple(without_directories(note) for note in self.notes),
        )

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        """Yields the caption, the table fitted to the terminal's width, and the notes."""
        yield Text(self.caption)
        yield from fit_columns(self.headers, self.rows, options.max_width)
        yield from (Text(note) for note in self.notes)


def records_table(records: Sequence[Record], view: View = "time") -> Table:
    """Returns the table of records of one kind."""
    shared, varying = split_fields(records)
    kind = single_kind(records)
    if (kind, view) not in COLUMNS:
        raise UsageError(f"records of kind {kind!r} have no {view} view")
    # Columns without any value are noise. MFU always stays, to show that it is unknown.
    known = {name for record in records for name in record.metrics}
    columns = [
        column
        for column in COLUMNS[kind, view]
        if column.always or not known.isdisjoint(column.metrics)
    ]
    rows = tuple(
        (
            *(field_text(field, record.case.get(field)) for field in varying),
            *_metric_texts(record, columns),
        )
        for record in records
    )
    return Table(
        headers=(
            *(field_label(field) for field in varying),
            *(column.header for column in columns),
        ),
        rows=rows,
        caption=describe_fields(shared),
        notes=(
            *(note for record in records for note in _notes(record, varying)),
            *((_UNSTEADY_NOTE,) if any(UNSTEADY in cell for row in rows for cell in row) else ()),
        ),
    )


def _notes(record: Record, varying: Sequence[str]) -> list[str]:
    case = describe_case(record, varying)
    notes = [f"{case}: warning: {warning}" for warning in record.warnings]
    if record.reason is not None:
        notes.append(f"{case}: {record.outcome.replace('_', ' ')}: {record.reason}")
    return notes


def _metric_texts(record: Record, columns: Sequence[Column]) -> list[str]:
    if not record.metrics:
        return [record.outcome.replace("_", " "), *("-" for _ in columns[1:])]
    texts = []
    for column in columns:
        present = [record.metrics[name] for name in column.metrics if name in record.metrics]
        texts.append(column.format(present) if present else NOT_APPLICABLE)
    return texts


def render_markdown(table: Table) -> str:
    """Renders a Markdown pipe table with its caption above and its notes below."""
    lines = [
        f"_{table.caption}_",
        "",
        _markdown_row(table.headers),
        _markdown_row(["---"] * len(table.headers)),
        *(_markdown_row(row) for row in table.rows),
        *(["", *(f"- {note}" for note in table.notes)] if table.notes else []),
    ]
    return "\n".join(lines) + "\n"


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def render_csv(records: Sequence[Record]) -> str:
    """Renders every case field, and value and standard deviation of every metric, as CSV."""
    case_fields = list(dict.fromkeys(field for record in records for field in record.case))
    metric_names = list(dict.fromkeys(name for record in records for name in record.metrics))
    output = io.StringIO()
    writer = csv.writer(output, lineterminator="\n")
    metric_headers = [header for name in metric_names for header in (name, f"{name}_std")]
    writer.writerow(["kind", *case_fields, "outcome", "reason", *metric_headers])
    for record in records:
        metrics: list[float | None] = []
        for name in metric_names:
            metric = record.metrics.get(name)
            metrics += (None, None) if metric is None else (metric.value, metric.std)
        case = [_csv_cell(record.case.get(field)) for field in case_fields]
        reason = _csv_cell(record.reason)
        writer.writerow([record.kind, *case, record.outcome, reason, *metrics])
    return output.getvalue()


def _csv_cell(value: CaseValue | None) -> CaseValue | None:
    """Returns a cell that no spreadsheet takes for a formula, and no terminal for a command."""
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text
