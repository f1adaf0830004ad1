"""Tables of goodput by recovery policy and measure, of a replayed run, and of injected faults."""

import statistics
from collections.abc import Callable, Sequence

from paceline.core.errors import UsageError
from paceline.records import CaseValue, Record
from paceline.reports.tables.table import Table


def goodput_table(records: Sequence[Record]) -> Table:
    """Returns a row per recovery policy: its goodput, and a breakdown of the lost time.

    Destinations of checkpoints whose goodput cannot be told apart share a row.
    """
    several = len({record.case["devices"] for record in records}) > 1
    alike = {id(group[0]): group for group in _not_told_apart(records)}
    columns: dict[str, Callable[[Record], object]] = {
        "recovery": lambda record: record.case["recovery"],
        "saves to": lambda record: ", ".join(
            str(each.case["checkpoint"]) for each in alike[id(record)]
        ),
        "spares": lambda record: record.case["spare_hosts"],
        "goodput": _with_error,
        "formula": _percent("formula_goodput"),
        "saving": _percent("stall_share"),
        "redone": _percent("lost_share"),
        "down": _percent("detection_share", "replacement_share", "restart_share", "load_share"),
        "absent": _percent("absent_share"),
    }
    devices = {"devices": lambda record: f"{record.case['devices']:,}"} if several else {}
    return Table.of(
        [group[0] for group in alike.values()],
        {**devices, **columns},
        caption=(
            ("" if several else f"{records[0].case['devices']:,} devices: ")
            + "share of the devices held, spare hosts included, that trains the model, simulated "
            "with its 95% interval and in closed form; then where the time went; checkpoints to "
            "several places are one row if their intervals overlap, with the figures of the first"
        ),
    )


def _not_told_apart(records: Sequence[Record]) -> list[list[Record]]:
    """Groups neighbours that differ only in where they save, and whose intervals overlap."""
    groups: list[list[Record]] = []
    for record in records:
        policy = {**record.case, "checkpoint": ""}
        first = groups[-1][0] if groups else None
        if (
            first is not None
            and {**first.case, "checkpoint": ""} == policy
            and abs(first.metrics["goodput"].value - record.metrics["goodput"].value)
            <= _error(first) + _error(record)
        ):
            groups[-1].append(record)
        else:
            groups.append([record])
    return groups


def _error(record: Record) -> float:
    metric = record.metrics["goodput"]
    return 0.0 if metric.high is None else metric.high - metric.value


def gains_table(records: Sequence[Record], notes: tuple[str, ...] = ()) -> Table:
    """Returns a row per number of devices: percentage points of goodput that each measure adds."""
    by_devices: dict[CaseValue, dict[tuple[CaseValue, CaseValue, bool], float]] = {}
    for record in records:
        case = record.case
        choice = (case["recovery"], case["checkpoint"], bool(case["spare_hosts"]))
        reached = by_devices.setdefault(case["devices"], {})
        reached[choice] = record.metrics["goodput"].value
    measured = ("replicas", "disk", False)
    gains = {
        devices: _gains(reached) for devices, reached in by_devices.items() if measured in reached
    }
    return Table(
        headers=("devices", "bare", "spares", "memory", "S3", "replicas", "replicas + spares"),
        rows=tuple((f"{devices:,}", *points) for devices, points in gains.items()),
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
    return Table.of(
        records,
        {
            "assumption": lambda record: record.case["assumption"],
            "effective time": _with_error,
            "formula": _percent("formula_goodput"),
            "points off": lambda record: (
                f"{100 * (record.metrics['goodput'].value - published):+.1f}"
            ),
        },
        caption=(
            f"{records[0].case['run']}: published rates of interruptions, published effective "
            f"time more than {published:.0%}; what was not published is assumed and varied"
        ),
    )


def _with_error(record: Record) -> str:
    return f"{record.metrics['goodput'].value:.1%} ± {100 * _error(record):.1f}"


def _percent(*metrics: str) -> Callable[[Record], str]:
    return lambda record: f"{sum(record.metrics[name].value for name in metrics):.1%}"


_RECOVERY = "recovery_time_s"


def chaos_table(faults: Sequence[Record]) -> Table:
    """Returns a row per kind of fault, and one for all faults."""
    groups: dict[str, list[Record]] = {}
    for record in faults:
        groups.setdefault(str(record.case["fault"]), []).append(record)

    def recovery(group: Sequence[Record], summarize: Callable[[list[float]], float]) -> str:
        times = [each.metrics[_RECOVERY].value for each in group if _RECOVERY in each.metrics]
        return f"{summarize(times):.1f}" if times else "-"

    return Table.of(
        [*groups.items(), ("all", faults)],
        {
            "fault": lambda item: item[0],
            "tried": lambda item: len(item[1]),
            "survived": lambda item: sum(record.outcome == "ok" for record in item[1]),
            "lost": lambda item: sum(record.outcome != "ok" for record in item[1]),
            "recovery, median (s)": lambda item: recovery(item[1], statistics.median),
            "worst (s)": lambda item: recovery(item[1], max),
        },
        caption="Survived: the run made another step; recovery is from the end of the fault to it",
        notes=tuple(
            f"{record.case['fault']} {record.case['number']}, {record.case['target']}: "
            f"{record.reason}"
            for record in faults
            if record.reason is not None
        ),
    )
