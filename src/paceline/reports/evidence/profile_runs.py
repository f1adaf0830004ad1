"""Which records of profiles belong together: the cases of most of them name no machine.

What a trace tells is filed under a subject, such as ``small, batch 4, context 256, float32, naive
attention, train``, and two machines, or two runs on one machine, use the same one. Their figures
must never share a table, so records are told apart by the machine and the moment of their
environments. Of each machine the newest run counts that still has all of its records: where a store
keeps only the newest record of a case, another run may have replaced some.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from paceline.records import Record
from paceline.reports.evidence.groups import Evidence
from paceline.reports.evidence.provenance import machine_of, moment_of, same_run
from paceline.traces.records import ALL_OPERATORS

_NUM_SEPARATORS = 5
"""Between the six parts of a subject: model, batch, context, precision, attention, phase."""
_PHASES = (", forward", ", train")
_ROUNDING = 0.01


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileRun:
    """What one run found of one step."""

    subject: str
    operators: tuple[Record, ...]
    expected: tuple[Record, ...]
    """The matmul FLOPs of the formula."""
    steps: tuple[Record, ...]
    """The traced steps as a whole."""
    memory: Record | None
    """Memory over the step; its case says all of model, device and hardware."""

    def in_range(self, name: str, *, of_kinds: bool) -> list[Record]:
        """Returns kinds of work, or single operators, of a range; the longest first."""
        found = [
            record
            for record in self.operators
            if record.case["range"] == name
            and (record.case["operator"] == ALL_OPERATORS) == of_kinds
        ]
        return sorted(found, key=own_time_s, reverse=True)


def own_time_s(record: Record) -> float:
    """Returns what an operator or a kind of work took by itself."""
    return record.metrics["own_time_s"].value


def subject_of(record: Record) -> str:
    """Returns the subject under which the operators and allocations of a step are filed."""
    case = record.case
    return (
        f"{case['model']}, batch {case['batch']}, context {case['context']}, "
        f"{case['precision']}, {case['attention']} attention, {case['phase']}"
    )


def find_profile_runs(evidence: Evidence) -> list[ProfileRun]:
    """Returns the newest whole run of every step on every machine."""
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
    """Returns of each machine the newest run that has all of its records."""
    machines: dict[tuple[object, ...], list[Record]] = {}
    for record in records:
        machines.setdefault(machine_of(record), []).append(record)
    whole = ([run for run in _runs(found) if _is_whole(run)] for found in machines.values())
    return [runs[0] for runs in whole if runs]


def _runs(records: Sequence[Record]) -> list[list[Record]]:
    """Divides what one machine measured by run, the newest first."""
    runs: list[list[Record]] = []
    for record in sorted(records, key=moment_of, reverse=True):
        if not runs or not same_run(runs[-1][0], record):
            runs.append([])
        runs[-1].append(record)
    return runs


def _is_whole(operators: Sequence[Record]) -> bool:
    """Whether the kinds of work of every range make up all of its time."""
    if not all(record.metrics for record in operators):
        return False
    shares = {record.case["range"]: 0.0 for record in operators if own_time_s(record)}
    for record in operators:
        if record.case["operator"] == ALL_OPERATORS and record.case["range"] in shares:
            shares[record.case["range"]] += record.metrics["share"].value
    return all(abs(share - 1) < _ROUNDING for share in shares.values())
