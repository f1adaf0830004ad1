"""Tables: for people (Markdown, terminal) and for programs (CSV).

A table for people shows the case fields that vary and puts the common ones in its caption.
CSV is flat and raw: every case field, and value and deviation of every metric.
"""

import csv
import dataclasses
import io
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from paceline.core.errors import UsageError
from paceline.core.units import format_binary_bytes, format_decimal
from paceline.records import Metric, Record
from paceline.reports.selection import (
    describe_case,
    describe_fields,
    field_label,
    field_text,
    single_kind,
    split_fields,
)

if TYPE_CHECKING:
    from rich.console import Group

View = Literal["time", "memory"]

_NOT_APPLICABLE = "n/a"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """Headers and rows of text."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str
    notes: tuple[str, ...] = ()
    """Why cases have no numbers, or numbers that are hard to believe."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Column:
    """One column: the metrics that it joins, and how."""

    header: str
    metrics: tuple[str, ...]
    format: Callable[[Sequence[Metric]], str]
    always: bool = False
    """Shown even where no record has a value."""


def _milliseconds(metrics: Sequence[Metric]) -> str:
    (metric,) = metrics
    # One sample has no spread, and a spread of zero would claim that it was exact.
    known = metric.std is not None and len(metric.samples) > 1
    spread = f" ± {_three_digits((metric.std or 0.0) * 1e3)}" if known else ""
    return f"{_three_digits(metric.value * 1e3)}{spread}"


def _three_digits(value: float) -> str:
    digits = 2 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{max(0, min(digits, 4))}f}"


def _largest_bytes(metrics: Sequence[Metric]) -> str:
    return format_binary_bytes(max(metric.value for metric in metrics))


def _percentages(metrics: Sequence[Metric]) -> str:
    return " / ".join(f"{metric.value:.1%}" for metric in metrics)


def _ratio(metrics: Sequence[Metric]) -> str:
    (metric,) = metrics
    return _with_interval(metric, lambda value: f"{value:.3f}")


def _with_interval(metric: Metric, write: Callable[[float], str]) -> str:
    if metric.low is None or metric.high is None:
        return write(metric.value)
    return f"{write(metric.value)} ({write(metric.low)} to {write(metric.high)})"


def _rate_column(header: str, metric: str) -> _Column:
    return _Column(
        header=header,
        metrics=(metric,),
        format=lambda metrics: format_decimal(metrics[0].value, "B/s"),
    )


def _flops_column(metric: str) -> _Column:
    return _Column(
        header="FLOP/s",
        metrics=(metric,),
        format=lambda metrics: format_decimal(metrics[0].value, ""),
    )


def _time_column(name: str) -> _Column:
    return _Column(header=f"{name} (ms)", metrics=(f"{name}_time_s",), format=_milliseconds)


def _number_column(header: str, metric: str, digits: str, *, unit: str = "") -> _Column:
    return _Column(
        header=header,
        metrics=(metric,),
        format=lambda metrics: f"{metrics[0].value:{digits}}{unit}",
    )


def _bytes_column(header: str, *metrics: str) -> _Column:
    return _Column(header=header, metrics=metrics, format=_largest_bytes)


# Where a step went: the first columns add up to it.
_STEP_PARTS = (
    *(
        _Column(header=f"{header} (ms)", metrics=(metric,), format=_milliseconds)
        for header, metric in (
            ("compute", "compute_s"),
            ("contention", "contention_s"),
            ("exposed", "exposed_communication_s"),
            ("idle", "idle_s"),
            ("step", "step_time_s"),
            ("hidden", "overlapped_communication_s"),
            ("exposed, as reported", "reported_exposed_s"),
        )
    ),
)

_INSTANTS = {
    "after_init": "after init",
    "before_step": "before step",
    "after_step": "after step",
}
_PEAKS = tuple(
    _bytes_column(header, f"peak_{instant}_bytes") for instant, header in _INSTANTS.items()
)

_COLUMNS: dict[tuple[str, View], tuple[_Column, ...]] = {
    ("step", "time"): (
        *(_time_column(name) for name in ("forward", "backward", "optimizer", "step")),
        _number_column("tokens/s", "tokens_per_s", ",.0f"),
        _flops_column("model_flops_per_s"),
        _Column(
            header="MFU / causal",
            metrics=("model_flops_utilization", "model_flops_utilization_causal"),
            format=_percentages,
            always=True,
        ),
        _bytes_column("peak", "peak_before_optimizer_bytes", "peak_after_optimizer_bytes"),
    ),
    ("step", "memory"): (
        _bytes_column("after init", "memory_after_init_bytes"),
        _bytes_column("before optimizer", "peak_before_optimizer_bytes"),
        _bytes_column("in optimizer", "peak_after_optimizer_bytes"),
        _bytes_column("resident after init", "resident_peak_after_init_bytes"),
        _bytes_column("resident before optimizer", "resident_peak_before_optimizer_bytes"),
        _bytes_column("resident after optimizer", "resident_peak_after_optimizer_bytes"),
    ),
    ("attention", "time"): (
        *(_time_column(name) for name in ("forward", "backward", "both")),
        _flops_column("flops_per_s"),
        _bytes_column("saved for backward", "saved_for_backward_bytes"),
        _bytes_column("peak", "peak_bytes"),
    ),
    ("kernel", "time"): (
        _number_column("registers", "registers", ".0f"),
        _number_column("spilled (B)", "spill_bytes", ".0f"),
        _bytes_column("shared", "shared_bytes"),
        _number_column("matrix instructions", "matrix_instructions", ".0f"),
        _number_column("occupancy", "occupancy", ".0%"),
        _number_column("FLOPs/B at worst", "worst_intensity", ".0f"),
        _number_column("at best", "best_intensity", ".0f"),
        _number_column("ceiling at worst", "worst_ceiling", ".0%"),
    ),
    ("comparison", "time"): (
        _Column(header="forward ratio", metrics=("forward_ratio",), format=_ratio),
        _Column(header="backward ratio", metrics=("backward_ratio",), format=_ratio),
        _Column(header="time ratio", metrics=("time_ratio",), format=_ratio),
    ),
    ("ddp", "time"): (
        _time_column("step"),
        _Column(header="ratio", metrics=("step_time_ratio",), format=_ratio),
        *(_time_column(name) for name in ("forward", "backward")),
        _Column(header="exposed (ms)", metrics=("exposed_communication_s",), format=_milliseconds),
        _Column(header="alone (ms)", metrics=("communication_s",), format=_milliseconds),
        _number_column("messages", "num_messages", ".0f"),
        _number_column("chosen", "chosen_bucket_size_mb", "g", unit=" MiB"),
    ),
    ("optimizer", "time"): (
        _time_column("step"),
        _time_column("optimizer"),
        *_PEAKS,
        *(
            _bytes_column(name.replace("_", " "), f"before_step_{name}_bytes")
            for name in ("parameters", "gradients", "optimizer_state", "buffers", "activations")
        ),
        _bytes_column("predicted", "predicted_peak_before_step_bytes"),
        _number_column("error", "peak_before_step_bytes_error", "+.2%"),
    ),
    ("optimizer", "memory"): (
        *_PEAKS,
        *(
            _bytes_column(f"predicted {header}", f"predicted_peak_{instant}_bytes")
            for instant, header in _INSTANTS.items()
        ),
        *(
            _bytes_column(f"resident {header}", f"resident_peak_{instant}_bytes")
            for instant, header in _INSTANTS.items()
        ),
    ),
    ("timeline", "time"): _STEP_PARTS,
    ("trace_step", "time"): _STEP_PARTS,
    ("allocation", "time"): (
        _bytes_column("size of each", "size_bytes"),
        _number_column("times", "num_allocations", ".0f"),
    ),
    ("memory_timeline", "time"): (
        _bytes_column("peak", "peak_bytes"),
        *(
            _bytes_column(f"{name.replace('_', ' ')} then", f"{name}_at_peak_bytes")
            for name in ("parameters", "optimizer_state", "gradients", "activations", "temporary")
        ),
    ),
    ("trace_analysis", "time"): (
        _number_column("time (s)", "time_s", ".1f"),
        _rate_column("speed", "bytes_per_s"),
        _bytes_column("resident peak", "resident_peak_bytes"),
        _number_column("events", "num_events", ",.0f"),
    ),
    ("operator", "time"): (
        _Column(header="own time (ms)", metrics=("own_time_s",), format=_milliseconds),
        _Column(header="share", metrics=("share",), format=_percentages),
        _number_column("calls", "num_calls", ".4g"),
        _Column(
            header="matmul FLOPs",
            metrics=("flops",),
            format=lambda metrics: format_decimal(metrics[0].value, ""),
        ),
    ),
    ("ddp", "memory"): (
        _bytes_column("gradients", "gradient_bytes"),
        _bytes_column("peak before optimizer", "peak_before_optimizer_bytes"),
    ),
    ("comm", "time"): (
        _Column(header="time (ms)", metrics=("time_s",), format=_milliseconds),
        _rate_column("algorithm bandwidth", "algorithm_bandwidth_bytes_per_s"),
        _rate_column("bus bandwidth", "bus_bandwidth_bytes_per_s"),
    ),
    ("collective_fit", "time"): (
        _Column(
            header="latency (ms)",
            metrics=("latency_s",),
            format=lambda metrics: _with_interval(
                metrics[0], lambda value: _three_digits(value * 1e3)
            ),
        ),
        _Column(
            header="bandwidth",
            metrics=("algorithm_bandwidth_bytes_per_s",),
            format=lambda metrics: _with_interval(
                metrics[0], lambda value: format_decimal(value, "B/s")
            ),
        ),
        _Column(header="largest error", metrics=("max_relative_error",), format=_percentages),
    ),
    ("environment", "time"): (_time_column("all_reduce"),),
}


def records_table(records: Sequence[Record], view: View = "time") -> Table:
    """Makes the table of records of one kind."""
    shared, varying = split_fields(records)
    kind = single_kind(records)
    if (kind, view) not in _COLUMNS:
        raise UsageError(f"records of kind {kind!r} have no {view} view")
    # A column that no record has anything for is noise; MFU stays, to say that it is not known.
    columns = [
        column
        for column in _COLUMNS[kind, view]
        if column.always or _has_any(records, column.metrics)
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
        notes=tuple(note for record in records for note in _notes(record, varying)),
    )


def _has_any(records: Sequence[Record], metrics: Sequence[str]) -> bool:
    return any(name in record.metrics for record in records for name in metrics)


def _notes(record: Record, varying: Sequence[str]) -> list[str]:
    case = describe_case(record, varying)
    notes = [f"{case}: warning: {warning}" for warning in record.warnings]
    if record.reason is not None:
        notes.append(f"{case}: {record.outcome.replace('_', ' ')}: {record.reason}")
    return notes


def _metric_texts(record: Record, columns: Sequence[_Column]) -> list[str]:
    if not record.metrics:
        return [record.outcome.replace("_", " "), *("-" for _ in columns[1:])]
    texts = []
    for column in columns:
        present = [record.metrics[name] for name in column.metrics if name in record.metrics]
        texts.append(column.format(present) if present else _NOT_APPLICABLE)
    return texts


def render_markdown(table: Table) -> str:
    """Renders a pipe table with its caption above."""
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


def render_rich(table: Table) -> "Group":
    """Renders a table for a terminal."""
    from rich.box import SIMPLE
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

    rendered = RichTable(box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    for header in table.headers:
        rendered.add_column(Text(header), overflow="fold")
    for row in table.rows:
        rendered.add_row(*(Text(cell) for cell in row))
    return Group(Text(table.caption), rendered, *(Text(note) for note in table.notes))


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
