"""Groups profile records by run, since the cases of most of them do not name a machine.

Trace records are stored under a subject, such as ``small, batch 4, context 256, float32, naive
attention, train``. Two machines, or two runs on one machine, use the same subject, but their
figures must never share a table. Records are therefore grouped by the machine and time of their
environment. For each machine, the newest complete run is used: in a store that keeps only the
newest record of a case, a later run may have replaced part of an earlier one.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from paceline.records import Record
from paceline.reports.evidence.groups import Evidence
from paceline.reports.evidence.provenance import machine_of, moment_of, same_run
from paceline.traces.records import ALL_OPERATORS

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


def subject_of(record: Record) -> str:
    """Returns the subject under which the operators and allocations of a step are stored."""
    case = record.case
    return (
        f"{case['model']}, batch {case['batch']}, context {case['context']}, "
        f"{case['precision']}, {case['attention']} attention, {case['phase']}"
    )


def find_profile_runs(evidence: Evidence) -> list[ProfileRun]:
    """Returns the newest complete run of every step on every machine."""
    by_subject: dict[str, list[Record]] = {}
    for record in evidence.find("operator"):
        subject = str(record.case["subject"])
        if subject.endswith(_PHASES) and subject.count(", ") >= _NUM_SEPARATORS:
            by_subject.setdefault(subject, []).append(record)
    return [
        _gather(evidence, subject, operators)
        for subject, found in by_subject.items()
        for operators in _newest_whole(found)
    ]


def _gather(evidence: Evidence, subject: str, operators: Sequence[Record]) -> ProfileRun:
    def of_run(records: Iterable[Record]) -> list[Record]:
        return [record for record in records if record.metrics and same_run(record, operators[0])]

    memory = of_run(evidence.find("memory_timeline"))
    memory = [record for record in memory if subject_of(record) == subject]
    expected = of_run(evidence.predictions("operator"))
    return ProfileRun(
        subject=subject,
        operators=tuple(operators),
        expected=tuple(record for record in expected if record.case["subject"] == subject),
        steps=tuple(of_run(evidence.find("trace_step", subject=subject))),
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
