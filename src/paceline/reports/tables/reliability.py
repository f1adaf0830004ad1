"""Tables of goodput by recovery policy and measure, of a replayed run, and of injected faults."""

import statistics
from collections.abc import Sequence

from paceline.core.errors import UsageError
from paceline.records import CaseValue, Record
from paceline.reports.tables.table import Table

_DOWN = ("detection_share", "replacement_share", "restart_share", "load_share")


def goodput_table(records: Sequence[Record]) -> Table:
    """Returns a row per recovery policy: its goodput, and a breakdown of the lost time."""
    sizes = {record.case["devices"] for record in records}
    several = len(sizes) > 1
    return Table(
        headers=(
            *(("devices",) if several else ()),
            *("recovery", "saves to", "spares", "goodput", "formula"),
            *("saving", "redone", "down", "absent"),
        ),
        rows=tuple(
            (
                *((f"{record.case['devices']:,}",) if several else ()),
                *(str(record.case[field]) for field in ("recovery", "checkpoint", "spare_hosts")),
                _with_error(record),
                _percent(record, "formula_goodput"),
                *(_percent(record, name) for name in ("stall_share", "lost_share")),
                f"{sum(record.metrics[name].value for name in _DOWN):.1%}",
                _percent(record, "absent_share"),
            )
            for record in records
        ),
        caption=(
            ("" if several else f"{records[0].case['devices']:,} devices: ")
            + "share of the devices held, spare hosts included, that trains the model, simulated "
            "with its 95% interval and in closed form; then where the time went"
        ),
    )


def gains_table(records: Sequence[Record], notes: tuple[str, ...] = ()) -> Table:
    """Returns a row per number of devices: percentage points of goodput that each measure adds."""
    by_devices: dict[CaseValue, dict[tuple[CaseValue, CaseValue, bool], float]] = {}
    for record in records:
        case = record.case
        choice = (case["recovery"], case["checkpoint"], bool(case["spare_hosts"]))
        reached = by_devices.setdefault(case["devices"], {})
        reached[choice] = record.metrics["goodput"].value
    rows = [
        (f"{devices:,}", *_gains(reached))
        for devices, reached in by_devices.items()
        if ("replicas", "disk", False) in reached
    ]
    return Table(
        headers=("devices", "bare", "spares", "memory", "S3", "replicas", "replicas + spares"),
        rows=tuple(rows),
        notes=notes,
        caption=(
            "Goodput of restarts from disk without spares (bare), and the points that are added: "
            "by hot spares; by memory, and by S3, instead of disk, both with the better of spares "
            "and none; by replicas without spares over the better of both; by spares beside "
            "replicas"
        ),
    )


def _gains(reached: dict[tuple[CaseValue, CaseValue, bool], float]) -> tuple[str, ...]:
    bare = reached["restart", "disk", False]
    spared = reached["restart", "disk", True]
    pays = spared > bare
    best = max(bare, spared)
    return (
        f"{bare:.1%}",
        *(
            f"{100 * gain:+.1f}"
            for gain in (
                spared - bare,
                reached["restart", "memory", pays] - best,
                reached["restart", "s3", pays] - best,
                reached["replicas", "disk", False] - best,
                reached["replicas", "disk", True] - reached["replicas", "disk", False],
            )
        ),
    )


def replay_table(records: Sequence[Record], published: float) -> Table:
    """Returns a row per assumption about a published run, with the error in percentage points."""
    if not records:
        raise UsageError("nothing was replayed")
    return Table(
        headers=("assumption", "effective time", "formula", "points off"),
        rows=tuple(
            (
                str(record.case["assumption"]),
                _with_error(record),
                _percent(record, "formula_goodput"),
                f"{100 * (record.metrics['goodput'].value - published):+.1f}",
            )
            for record in records
        ),
        caption=(
            f"{records[0].case['run']}: published rates of interruptions, published effective "
            f"time more than {published:.0%}; what was not published is assumed and varied"
        ),
    )


def _with_error(record: Record) -> str:
    metric = record.metrics["goodput"]
    error = 0.0 if metric.high is None else metric.high - metric.value
    return f"{metric.value:.1%} ± {100 * error:.1f}"


def _percent(record: Record, metric: str) -> str:
    return f"{record.metrics[metric].value:.1%}"


_RECOVERY = "recovery_time_s"


def chaos_table(faults: Sequence[Record]) -> Table:
    """Returns a row per kind of fault, and one for all faults."""
    by_kind: dict[str, list[Record]] = {}
    for record in faults:
        by_kind.setdefault(str(record.case["fault"]), []).append(record)
    rows = [(kind, *_counts(group)) for kind, group in by_kind.items()]
    return Table(
        headers=("fault", "tried", "survived", "lost", "recovery, median (s)", "worst (s)"),
        rows=(*rows, ("all", *_counts(faults))),
        caption="Survived: the run made another step; recovery is from the end of the fault to it",
        notes=tuple(
            f"{record.case['fault']} {record.case['number']}, {record.case['target']}: "
            f"{record.reason}"
            for record in faults
            if record.reason is not None
        ),
    )


def _counts(group: Sequence[Record]) -> tuple[str, ...]:
    lost = sum(record.outcome != "ok" for record in group)
    times = [record.metrics[_RECOVERY].value for record in group if _RECOVERY in record.metrics]
    return (
        str(len(group)),
        str(len(group) - lost),
        str(lost),
        f"{statistics.median(times):.1f}" if times else "-",
        f"{max(times):.1f}" if times else "-",
    )
