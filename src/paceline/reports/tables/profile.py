"""Tables of traced steps: time by kind of work and operator, FLOPs, and memory."""

from collections.abc import Callable, Sequence

from paceline.core.errors import UsageError
from paceline.core.units import format_binary_bytes, format_decimal
from paceline.records import Record, join_key
from paceline.records.kinds import PREDICTION
from paceline.reports.tables.predictions import with_predictions
from paceline.reports.tables.table import Table
from paceline.traces.analysis import ALL_OPERATORS


def work_table(records: Sequence[Record], subject: str) -> Table:
    """Returns the time and share of each kind of work in every phase of a step."""
    rows = _operators(records, subject, only_kinds=True)
    phases = [
        phase
        for phase in ("forward", "backward", "optimizer", "whole step")
        if any(record.case["range"] == phase for record in rows)
    ]
    by_place = {(record.case["work"], record.case["range"]): record for record in rows}
    longest_first = sorted(rows, key=lambda record: -record.metrics["own_time_s"].value)
    kinds = dict.fromkeys(record.case["work"] for record in longest_first)
    return Table(
        headers=("work", *(f"{phase}: ms, share" for phase in phases)),
        rows=tuple(
            (str(kind), *(_time_and_share(by_place.get((kind, phase))) for phase in phases))
            for kind in kinds
        ),
        caption=f"{subject}; one step",
    )


def operator_table(records: Sequence[Record], subject: str, range_name: str) -> Table:
    """Returns the longest operators of one range."""
    found = _operators(records, subject, only_kinds=False)
    return Table.of(
        [record for record in found if record.case["range"] == range_name],
        {
            "operator": lambda record: record.case["operator"],
            "work": lambda record: record.case["work"],
            "calls": lambda record: f"{record.metrics['num_calls'].value:.4g}",
            "own time (ms)": lambda record: f"{record.metrics['own_time_s'].value * 1e3:.1f}",
            "share": lambda record: f"{record.metrics['share'].value:.1%}",
        },
        caption=f"{subject}; {range_name} of one step",
    )


def attention_table(records: Sequence[Record], subject: str) -> Table:
    """Returns time and matmul FLOPs of each part of attention in forward."""
    kinds = _operators(records, subject, only_kinds=True)
    rows = []
    for part in ("scores", "softmax", "values"):
        found = [each.metrics for each in kinds if each.case["range"] == f"attention_{part}"]
        if found:
            seconds = sum(metrics["own_time_s"].value for metrics in found)
            flops = sum(metrics["flops"].value for metrics in found)
            total = format_decimal(flops, "") if flops else "-"
            rate = format_decimal(flops / seconds, "") if flops and seconds else "-"
            rows.append((part, f"{seconds * 1e3:.1f}", total, rate))
    return Table(
        headers=("part of attention", "time (ms)", "matmul FLOPs", "FLOP/s"),
        rows=tuple(rows),
        caption=f"{subject}; all layers of one forward pass",
    )


def flops_table(records: Sequence[Record]) -> Table:
    """Returns traced matmul FLOPs next to those of the formula.

    Phases without traced FLOPs are left out, such as those of GPU kernels.
    """
    operators = {join_key(record): record for record in records if record.kind == "operator"}
    rows = []
    for record in records:
        if record.kind == PREDICTION and join_key(record) in operators:
            counts = [each.metrics["flops"].value for each in (operators[join_key(record)], record)]
            if all(counts):
                step = str(record.case["subject"]), str(record.case["range"])
                texts = (format_decimal(count, "") for count in counts)
                rows.append((*step, *texts, f"{counts[0] / counts[1]:.4f}"))
    return Table(
        headers=("step", "phase", "traced", "formula", "ratio"),
        rows=tuple(rows),
        caption="matmul FLOPs of one step",
    )


def memory_table(records: Sequence[Record]) -> Table:
    """Returns the peak memory of each step by category, and the lower bound from the formulas."""
    measured = [record for record in records if record.kind == "memory_timeline"]
    columns: dict[str, Callable[[Record], object]] = {
        "phase": lambda record: record.case["phase"],
        "context": lambda record: record.case["context"],
        "precision": lambda record: record.case["precision"],
        "peak": _size("peak_bytes"),
    }
    for name in ("parameters", "optimizer_state", "gradients", "activations", "temporary"):
        columns[name.replace("_", " ")] = _size(f"{name}_at_peak_bytes")
    columns["lower bound"] = _size("predicted_peak_bytes")
    rows = with_predictions(measured, records)
    return Table.of(rows, columns, caption="memory of one step at its peak")


def _size(metric: str) -> Callable[[Record], str]:
    return lambda record: format_binary_bytes(record.metrics[metric].value)


def _operators(records: Sequence[Record], subject: str, *, only_kinds: bool) -> list[Record]:
    chosen = [
        record
        for record in records
        if record.kind == "operator"
        and record.case["subject"] == subject
        and (record.case["operator"] == ALL_OPERATORS) == only_kinds
    ]
    if not chosen:
        raise UsageError(f"the store has no trace of {subject!r}")
    return chosen


def _time_and_share(record: Record | None) -> str:
    if record is None:
        return "-"
    return f"{record.metrics['own_time_s'].value * 1e3:.1f}, {record.metrics['share'].value:.1%}"
