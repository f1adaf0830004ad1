"""Tables for people (Markdown, terminal) and for programs (CSV).

A table for people has a column per varying case field; its caption lists the shared ones.
CSV is flat and raw: every case field, and value and standard deviation of every metric.
"""

import csv
import dataclasses
import io
from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from paceline.core.errors import UsageError
from paceline.records import Record
from paceline.reports.evidence.fields import (
    describe_case,
    describe_fields,
    field_label,
    field_text,
    single_kind,
    split_fields,
)
from paceline.reports.tables.columns import COLUMNS, UNSTEADY, Column, View
from paceline.reports.tables.terminal import NOT_APPLICABLE, fit_columns

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
        case = [record.case.get(field) for field in case_fields]
        writer.writerow([record.kind, *case, record.outcome, record.reason, *metrics])
    return output.getvalue()
