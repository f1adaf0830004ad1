"""The records behind a report, where they come from, and groups of them that may be compared.

A store holds measurements from several machines and configurations. Records are comparable if their
cases differ only in the fields that a question varies. For each location (device, hardware, hosts
and link rate), the group with the most measured cases answers the question.

Trace records are stored under a subject, such as ``small, batch 4, context 256, float32, naive
attention, train``, which does not name a machine. Two machines, or two runs on one machine, use the
same subject, but their figures must never share a table. They are therefore grouped by the machine
and time of their environment. For each machine, the newest complete run is used: in a store that
keeps only the newest record of a case, a later run may have replaced part of an earlier one.
"""

import collections
import dataclasses
import datetime
import pathlib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeAlias

from paceline.core.units import format_decimal, format_gibibytes, to_gibibytes
from paceline.records import CaseValue, Environment, Record, join_key
from paceline.records.kinds import LINK_RATE, MEASURED_RATES, NUM_SITES, PREDICTION, SITE_RATE
from paceline.records.store import case_key
from paceline.reports.comparison import Ratio, compare
from paceline.reports.fields import case_number
from paceline.traces.analysis import ALL_OPERATORS, step_subject

_STAMPING = datetime.timedelta(seconds=2)
"""Timestamps of records from one run of a command differ by at most this."""


def machine_of(record: Record) -> tuple[object, ...]:
    """Returns a key that identifies the machine of a record."""
    there = record.environment
    return (there.processor, there.num_processors, there.memory_bytes, there.devices)


def moment_of(record: Record) -> datetime.datetime:
    """Returns the time at which a record was created."""
    moment = datetime.datetime.fromisoformat(record.environment.time)
    return moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)


def same_run(first: Record, second: Record) -> bool:
    """Returns whether two records come from the same run of a command."""
    apart = abs(moment_of(first) - moment_of(second))
    return machine_of(first) == machine_of(second) and apart <= _STAMPING


def describe_topology(record: Record) -> str:
    """Returns the hardware, hosts and sites of a case, and the rates of links that are shaped."""
    case = record.case
    parts = [str(case.get("hardware", record.environment.processor))]
    if "num_hosts" in case:
        hosts = case["num_hosts"]
        parts.append("one host" if hosts == 1 else f"{hosts} hosts")
    if NUM_SITES in case:
        parts.append(f"{case[NUM_SITES]} sites")
    for field, name in ((LINK_RATE, "links"), (SITE_RATE, "uplinks")):
        rate = case.get(field)
        if isinstance(rate, int | float):
            parts.append(f"{name} of {format_decimal(rate, 'bit/s')}")
    return ", ".join(parts)


def describe_machines(records: Sequence[Record]) -> tuple[str, ...]:
    """Returns one line per machine with its number of records, regardless of software."""
    counts = collections.Counter(_hardware(record.environment) for record in records)
    return tuple(f"{machine}: {count} records" for machine, count in counts.items())


def describe_environments(records: Sequence[Record]) -> tuple[str, ...]:
    """Returns one line per environment of the records, with the dates of measurement."""
    times: dict[str, list[str]] = {}
    for record in records:
        times.setdefault(describe_environment(record.environment), []).append(
            record.environment.time
        )
    lines = []
    for machine, found in times.items():
        days = sorted({time[:10] for time in found})
        period = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        lines.append(f"{machine}; {period}")
    return tuple(lines)


def describe_environment(environment: Environment) -> str:
    """Returns the hardware and software of an environment on one line."""
    packages = (f"{name} {version}" for name, version in environment.packages.items())
    software = ", ".join((f"Python {environment.python}", *packages))
    version = f"paceline {environment.paceline}"
    if environment.commit is not None:
        changed = ", modified" if environment.modified else ""
        version += f" at {environment.commit[:10]}{changed}"
    return "; ".join((_hardware(environment), software, environment.platform, version))


def _hardware(environment: Environment) -> str:
    memory = ""
    if environment.memory_bytes is not None:
        memory = f", {format_gibibytes(to_gibibytes(environment.memory_bytes), 1)}"
    processors = f"{environment.processor} ({environment.num_processors} processors{memory})"
    return "; ".join((processors, *environment.devices))


Predicate: TypeAlias = Callable[[Sequence[Record]], bool]
"""A condition on a group of records."""

_LOCATION = ("device", "hardware", "num_hosts", LINK_RATE, NUM_SITES, SITE_RATE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordSet:
    """The newest record of every case, and training runs for scaling laws."""

    records: tuple[Record, ...]
    runs: pathlib.Path | None = None
    """File of training runs for the scaling-law question; without one, synthetic runs are used."""

    @classmethod
    def of(cls, records: Sequence[Record], runs: pathlib.Path | None = None) -> "RecordSet":
        """Keeps the newest record of each case; a failure never replaces a measurement."""
        kept: dict[object, Record] = {}
        for record in records:
            key = _identity(record)
            if record.metrics or key not in kept or not kept[key].metrics:
                kept[key] = record
        return cls(records=tuple(kept.values()), runs=runs)

    def find(self, kind: str, **fields: CaseValue | tuple[CaseValue, ...]) -> list[Record]:
        """Returns the records of a kind that match all `fields`; a tuple lists allowed values."""
        wanted = {
            name: values if isinstance(values, tuple) else (values,)
            for name, values in fields.items()
        }
        return [
            record
            for record in self.records
            if record.kind == kind
            and all(record.case.get(name) in values for name, values in wanted.items())
        ]

    def predictions(self, kind: str) -> list[Record]:
        """Returns the predictions for a kind."""
        return [
            record
            for record in self.records
            if record.kind == PREDICTION and record.measured_kind.name == kind
        ]

    def predictions_for(self, kind: str, measured: Sequence[Record]) -> list[Record]:
        """Returns the predictions for exactly the cases in `measured`."""
        keys = {join_key(record) for record in measured}
        return [record for record in self.predictions(kind) if join_key(record) in keys]


def _identity(record: Record) -> object:
    """Returns the key under which newer records replace older ones.

    The key is the case, plus the machine for kinds whose case does not name it.
    """
    fields = record.measured_kind.join_key
    if "subject" not in fields or "hardware" in fields:
        return case_key(record)
    return (case_key(record), machine_of(record))


def comparable_groups(
    records: Sequence[Record], over: Collection[str], *, holds: Predicate | None = None
) -> list[list[Record]]:
    """Returns, for every location, the largest group of records that differ only in `over`.

    A group needs at least one measured record, and its measured records must satisfy `holds`.
    """
    groups: dict[frozenset[tuple[str, CaseValue]], list[Record]] = {}
    left_out = {*over, *MEASURED_RATES}
    for record in records:
        key = frozenset(item for item in record.case.items() if item[0] not in left_out)
        groups.setdefault(key, []).append(record)
    best: dict[tuple[CaseValue, ...], list[Record]] = {}
    for group in groups.values():
        measured = [record for record in group if record.metrics]
        if not measured or not (holds is None or holds(measured)):
            continue
        location = tuple(group[0].case.get(field) for field in _LOCATION)
        if location not in best or _weight(group) > _weight(best[location]):
            best[location] = group
    return list(best.values())


def varies(field: str) -> Predicate:
    """Returns a predicate: the records have at least two values of `field`."""
    return lambda records: len({record.case.get(field) for record in records}) > 1


def includes(field: str, *values: CaseValue) -> Predicate:
    """Returns a predicate: the records include all of these values of `field`."""
    return lambda records: set(values) <= {record.case.get(field) for record in records}


def _weight(group: Sequence[Record]) -> tuple[int, str]:
    """Returns the sort key of a group: the number of measured cases, then the newest time."""
    return (
        sum(bool(record.metrics) for record in group),
        max(record.environment.time for record in group),
    )


_NUM_SEPARATORS = 5
"""Commas between the six parts of a subject: model, batch, context, precision, attention, phase."""
_PHASES = (", forward", ", train")
_ROUNDING = 0.01


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileRun:
    """The records of one profiled step from one run."""

    subject: str
    operators: tuple[Record, ...]
    expected: tuple[Record, ...]
    """Matmul FLOPs predicted by the formula."""
    steps: tuple[Record, ...]
    """Records of whole traced steps."""
    memory: Record | None
    """Memory over the step; its case describes model, device and hardware in full."""

    def in_range(self, name: str, *, of_kinds: bool) -> list[Record]:
        """Returns the kinds of work or the single operators of a range, longest first."""
        found = [
            record
            for record in self.operators
            if record.case["range"] == name
            and (record.case["operator"] == ALL_OPERATORS) == of_kinds
        ]
        return sorted(found, key=own_time_s, reverse=True)


def own_time_s(record: Record) -> float:
    """Returns the self time of an operator or a kind of work."""
    return record.metrics["own_time_s"].value


def find_profile_runs(record_set: RecordSet) -> list[ProfileRun]:
    """Returns the newest complete run of every step on every machine."""
    by_subject: dict[str, list[Record]] = {}
    for record in record_set.find("operator"):
        subject = str(record.case["subject"])
        if subject.endswith(_PHASES) and subject.count(", ") >= _NUM_SEPARATORS:
            by_subject.setdefault(subject, []).append(record)
    return [
        _gather(record_set, subject, operators)
        for subject, found in by_subject.items()
        for operators in _newest_whole(found)
    ]


def _gather(record_set: RecordSet, subject: str, operators: Sequence[Record]) -> ProfileRun:
    def of_run(records: Iterable[Record]) -> list[Record]:
        return [record for record in records if record.metrics and same_run(record, operators[0])]

    memory = of_run(record_set.find("memory_timeline"))
    memory = [record for record in memory if step_subject(record.case) == subject]
    expected = of_run(record_set.predictions("operator"))
    return ProfileRun(
        subject=subject,
        operators=tuple(operators),
        expected=tuple(record for record in expected if record.case["subject"] == subject),
        steps=tuple(of_run(record_set.find("trace_step", subject=subject))),
        memory=memory[-1] if memory else None,
    )


def _newest_whole(records: Sequence[Record]) -> list[list[Record]]:
    """Returns the newest complete run of each machine."""
    machines: dict[tuple[object, ...], list[Record]] = {}
    for record in records:
        machines.setdefault(machine_of(record), []).append(record)
    whole = ([run for run in _runs(found) if _is_whole(run)] for found in machines.values())
    return [runs[0] for runs in whole if runs]


def _runs(records: Sequence[Record]) -> list[list[Record]]:
    """Groups the records of one machine by run, newest first."""
    runs: list[list[Record]] = []
    for record in sorted(records, key=moment_of, reverse=True):
        if not runs or not same_run(runs[-1][0], record):
            runs.append([])
        runs[-1].append(record)
    return runs


def _is_whole(operators: Sequence[Record]) -> bool:
    """Returns whether the shares of the kinds of work add up to 1 in every range."""
    if not all(record.metrics for record in operators):
        return False
    shares = {record.case["range"]: 0.0 for record in operators if own_time_s(record)}
    for record in operators:
        if record.case["operator"] == ALL_OPERATORS and record.case["range"] in shares:
            shares[record.case["range"]] += record.metrics["share"].value
    return all(abs(share - 1) < _ROUNDING for share in shares.values())


STRATEGIES = ("none", "naive", "flat", "overlapped", "ddp", "torch_ddp")
"""Strategies in display order."""
OVER = ("strategy", "bucket_size_mb")
"""Case fields that distinguish strategies."""
EXPOSED = "exposed_communication_s"
_STEP = "step_time_s"


def strategy_groups(record_set: RecordSet, *needed: str) -> list[list[Record]]:
    """Returns, for every location, a group of measured strategies that includes all in `needed`."""
    found = [
        record
        for record in record_set.find("ddp", strategy=STRATEGIES, compile="none", compression=None)
        if record.metrics and step_seconds(record) > 0 and has_peers(record)
    ]
    return comparable_groups(found, OVER, holds=includes("strategy", *needed))


def has_peers(record: Record) -> bool:
    """Returns whether the world size exceeds 1; a single rank sends nothing."""
    return case_number(record, "world_size") > 1


def of_strategies(group: Sequence[Record], *names: str) -> list[Record]:
    """Returns the records of the named strategies, in the order of `names`."""
    return [record for name in names for record in group if record.case["strategy"] == name]


def step_seconds(record: Record) -> float:
    """Returns the step time."""
    return record.metrics[_STEP].value


def exposed_seconds(record: Record) -> float:
    """Returns the exposed communication: the wait for communication after backward."""
    return record.metrics[EXPOSED].value


def strategy_ratio(subject: Record, baseline: Record, metric: str = _STEP) -> Ratio | None:
    """Compares two strategies; round by round within one run, whose steps are interleaved."""
    in_turn = same_run(subject, baseline)
    return compare(subject.metrics[metric], baseline.metrics[metric], in_turn=in_turn)
