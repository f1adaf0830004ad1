"""Tables: for people (Markdown, terminal) and for programs (CSV).

A table for people shows the case fields that vary and puts the common ones in its caption.
CSV is flat and complete: every case field and every metric of every record, raw.
"""

import csv
import dataclasses
import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from paceline.core.units import format_binary_bytes, format_decimal
from paceline.records import CaseValue, Metric, Record
from paceline.reports.selection import describe_fields, single_kind, split_fields

if TYPE_CHECKING:
    from rich.console import Group

_NOT_APPLICABLE = "n/a"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """Headers and rows of text."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Column:
    header: str
    metrics: tuple[str, ...]
    format: Callable[[Metric], str]


def _milliseconds(metric: Metric) -> str:
    spread = "" if metric.std is None else f" ± {metric.std * 1e3:.3g}"
    return f"{metric.value * 1e3:.4g}{spread}"


def _bytes(metric: Metric) -> str:
    return format_binary_bytes(metric.value)


def _percent(metric: Metric) -> str:
    return f"{metric.value:.1%}"


# A column takes the largest of its metrics: a peak is the largest of the peaks of the phases.
_COLUMNS: dict[str, tuple[_Column, ...]] = {
    "step": (
        _Column(header="forward (ms)", metrics=("forward_time_s",), format=_milliseconds),
        _Column(header="backward (ms)", metrics=("backward_time_s",), format=_milliseconds),
        _Column(header="optimizer (ms)", metrics=("optimizer_time_s",), format=_milliseconds),
        _Column(header="step (ms)", metrics=("step_time_s",), format=_milliseconds),
        _Column(
            header="tokens/s",
            metrics=("tokens_per_s",),
            format=lambda metric: f"{metric.value:,.0f}",
        ),
        _Column(
            header="model FLOP/s",
            metrics=("model_flops_per_s",),
            format=lambda metric: format_decimal(metric.value, "FLOP/s"),
        ),
        _Column(header="MFU", metrics=("model_flops_utilization",), format=_percent),
        _Column(
            header="MFU (causal)", metrics=("model_flops_utilization_causal",), format=_percent
        ),
        _Column(header="after init", metrics=("memory_after_init_bytes",), format=_bytes),
        _Column(
            header="peak memory",
            metrics=("peak_before_optimizer_bytes", "peak_after_optimizer_bytes"),
            format=_bytes,
        ),
    ),
    "attention": (
        _Column(header="forward (ms)", metrics=("forward_time_s",), format=_milliseconds),
        _Column(header="backward (ms)", metrics=("backward_time_s",), format=_milliseconds),
        _Column(header="saved for backward", metrics=("saved_for_backward_bytes",), format=_bytes),
        _Column(header="peak memory", metrics=("peak_bytes",), format=_bytes),
    ),
    "environment": (
        _Column(header="all-reduce (ms)", metrics=("all_reduce_time_s",), format=_milliseconds),
    ),
}


def records_table(records: Sequence[Record]) -> Table:
    """Makes the table of records of one kind."""
    shared, varying = split_fields(records)
    columns = _COLUMNS[single_kind(records)]
    rows = tuple(
        (
            *(_case_text(record.case.get(field)) for field in varying),
            *_metric_texts(record, columns),
        )
        for record in records
    )
    return Table(
        headers=(
            *(field.replace("_", " ") for field in varying),
            *(column.header for column in columns),
        ),
        rows=rows,
        caption=describe_fields(shared),
    )


def _case_text(value: CaseValue) -> str:
    return _NOT_APPLICABLE if value is None else str(value)


def _metric_texts(record: Record, columns: Sequence[_Column]) -> list[str]:
    if not record.metrics:
        return [record.outcome.replace("_", " "), *("-" for _ in columns[1:])]
    texts = []
    for column in columns:
        present = [record.metrics[name] for name in column.metrics if name in record.metrics]
        largest = max(present, key=lambda metric: metric.value, default=None)
        texts.append(_NOT_APPLICABLE if largest is None else column.format(largest))
    return texts


def render_markdown(table: Table) -> str:
    """Renders a pipe table with its caption above."""
    lines = [
        f"_{table.caption}_",
        "",
        _markdown_row(table.headers),
        _markdown_row(["---"] * len(table.headers)),
        *(_markdown_row(row) for row in table.rows),
    ]
    return "\n".join(lines) + "\n"


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def render_rich(table: Table) -> "Group":
    """Renders a table for a terminal."""
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

    rendered = RichTable()
    for header in table.headers:
        rendered.add_column(Text(header))
    for row in table.rows:
        rendered.add_row(*(Text(cell) for cell in row))
    return Group(Text(table.caption), rendered)


def render_csv(records: Sequence[Record]) -> str:
    """Renders every case field, and value and deviation of every metric, as CSV."""
    case_fields = list(dict.fromkeys(field for record in records for field in record.case))
    metric_names = list(dict.fromkeys(name for record in records for name in record.metrics))
    output = io.StringIO()
    writer = csv.writer(output, lineterminator="\n")
    metric_headers = [header for name in metric_names for header in (name, f"{name}_std")]
    writer.writerow(["kind", *case_fields, "outcome", "reason", *metric_headers])
    for record in records:
        metrics = [
            number
            for name in metric_names
            for number in _value_and_deviation(record.metrics.get(name))
        ]
        case = [record.case.get(field) for field in case_fields]
        writer.writerow([record.kind, *case, record.outcome, record.reason, *metrics])
    return output.getvalue()


def _value_and_deviation(metric: Metric | None) -> tuple[float | None, float | None]:
    return (None, None) if metric is None else (metric.value, metric.std)
