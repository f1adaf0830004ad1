"""Tables of attention implementations side by side, of kernels, and of changes between stores."""

from collections.abc import Sequence

from paceline.core.units import KIB, format_binary_bytes, format_seconds
from paceline.records import CaseValue, Metric, Record
from paceline.reports.comparison import Ratio, StoreComparison
from paceline.reports.fields import case_number, describe_case, describe_fields, split_fields
from paceline.reports.tables.table import Table

_VARIANTS = ("mask", "lengths", "group", "triton")


def implementations_table(records: Sequence[Record]) -> Table:
    """Returns a row per dtype, head dim and length, with times and peak of each implementation."""
    measured = [record for record in records if record.metrics]
    names = list(dict.fromkeys(str(record.case["implementation"]) for record in measured))
    groups: dict[tuple[object, ...], dict[str, Record]] = {}
    for record in sorted(records, key=_row):
        groups.setdefault(_row(record), {})[str(record.case["implementation"])] = record
    shared, _varying = split_fields(records)
    return Table(
        headers=(
            *("dtype", "head dim", "context"),
            *(f"{name}: forward, backward (ms)" for name in names),
            *(f"{name}: peak" for name in names),
        ),
        rows=tuple(
            (
                *(str(value) for value in key),
                *(_times(found.get(name)) for name in names),
                *(_peak(found.get(name)) for name in names),
            )
            for key, found in groups.items()
        ),
        caption=describe_fields(shared),
        notes=tuple(dict.fromkeys(record.reason for record in records if record.reason)),
    )


def _row(record: Record) -> tuple[str, float, float]:
    sizes = case_number(record, "head_dim"), case_number(record, "context")
    return str(record.case["dtype"]), *sizes


def _times(record: Record | None) -> str:
    if record is None:
        return "-"
    if not record.metrics:
        return record.outcome.replace("_", " ")
    passes = [record.metrics[f"{name}_time_s"].value * 1e3 for name in ("forward", "backward")]
    return ", ".join(f"{time:.3g}" if time < 1000 else f"{time:.0f}" for time in passes)


def _peak(record: Record | None) -> str:
    if record is None or not record.metrics:
        return "-"
    return format_binary_bytes(record.metrics["peak_bytes"].value)


def kernels_table(records: Sequence[Record]) -> Table:
    """Returns a row per kernel and architecture, with ranges over masks, lengths and groups.

    Ranges also cover Triton versions if these vary.
    """
    groups: dict[tuple[CaseValue, ...], list[Record]] = {}
    for record in records:
        case = record.case
        blocks = "x".join(str(case[name] or "-") for name in ("block_queries", "block_keys"))
        key = (
            *(case["architecture"], case["head_dim"], case["kernel"], blocks),
            *(case["num_warps"], case["num_stages"]),
        )
        groups.setdefault(key, []).append(record)
    _shared, varying = split_fields(records)
    return Table(
        headers=(
            *("architecture", "head dim", "kernel", "tile", "warps", "stages", "registers"),
            *("spilled (B)", "shared (KiB)", "matrix instructions", "occupancy"),
            *("FLOPs/B at worst", "at best", "ceiling at worst"),
        ),
        rows=tuple(
            (*(str(value) for value in key), *_kernel_cells(found)) for key, found in groups.items()
        ),
        caption=", ".join(
            f"{field} {' and '.join(dict.fromkeys(str(each.case[field]) for each in records))}"
            for field in _VARIANTS
            if field in varying
        ),
        notes=tuple(dict.fromkeys(record.reason for record in records if record.reason)),
    )


def _kernel_cells(records: Sequence[Record]) -> tuple[str, ...]:
    failed = [record.outcome for record in records if not record.metrics]
    if failed:
        return (failed[0], *("-" for _ in range(7)))
    return (
        _range(records, "registers", "{:.0f}"),
        _range(records, "spill_bytes", "{:.0f}"),
        _range(records, "shared_bytes", "{:.0f}", scale=1 / KIB),
        _range(records, "matrix_instructions", "{:.0f}"),
        _range(records, "occupancy", "{:.0%}"),
        _range(records, "worst_intensity", "{:.0f}"),
        _range(records, "best_intensity", "{:,.0f}"),
        _range(records, "worst_ceiling", "{:.0%}"),
    )


def _range(records: Sequence[Record], metric: str, form: str, *, scale: float = 1.0) -> str:
    values = [record.metrics[metric].value * scale for record in records]
    ends = dict.fromkeys(form.format(value) for value in (min(values), max(values)))
    return " to ".join(ends)


_MOST_ROWS = 30


def regression_table(found: StoreComparison, tolerance: float) -> Table:
    """Returns a row per metric, up to a maximum number of rows; the notes count the rest."""
    kinds = {change.record.kind for change in found.changes}
    varying = {
        kind: split_fields([each.record for each in found.changes if each.record.kind == kind])[1]
        for kind in kinds
    }
    counts = {
        verdict: sum(change.verdict == verdict for change in found.changes)
        for verdict in ("worse", "alike", "better")
    }
    hidden = len(found.changes) - _MOST_ROWS
    lacking = found.num_only_before, found.num_only_after
    return Table.of(
        found.changes[:_MOST_ROWS],
        {
            "case": lambda change: describe_case(change.record, varying[change.record.kind]),
            "metric": lambda change: change.metric,
            "before": lambda change: _written(change.metric, change.before),
            "after": lambda change: _written(change.metric, change.after),
            "ratio": lambda change: _ratio(change.ratio),
            "": lambda change: "" if change.verdict == "alike" else change.verdict,
        },
        caption=f"{counts['worse']} worse by more than {tolerance:.0%}, {counts['alike']} alike, "
        f"{counts['better']} better",
        notes=(
            *((f"{hidden} more, which have changed less.",) if hidden > 0 else ()),
            *((f"{lacking[0]} cases are only in the first store.",) if lacking[0] else ()),
            *((f"{lacking[1]} cases are only in the second store.",) if lacking[1] else ()),
        ),
    )


def _ratio(ratio: Ratio) -> str:
    interval = f" ({ratio.low:.3f} to {ratio.high:.3f})" if ratio.num_samples > 1 else ""
    return f"{ratio.value:.3f}{interval}"


def _written(name: str, metric: Metric) -> str:
    return (format_binary_bytes if name.endswith("_bytes") else format_seconds)(metric.value)
