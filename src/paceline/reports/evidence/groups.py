"""The records behind a report, and groups of records that may be compared.

A store holds measurements from several machines and configurations. Records are comparable if their
cases differ only in the fields that a question varies. For each place (device, hardware, hosts and
link rate), the group with the most measured cases answers the question.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

from paceline.records import CaseValue, Record, join_key
from paceline.records.kinds import LINK_RATE, MEASURED_LINK_RATE, PREDICTION
from paceline.records.store import case_key
from paceline.reports.evidence.provenance import machine_of

Predicate: TypeAlias = Callable[[Sequence[Record]], bool]
"""A condition on a group of records."""

_PLACE = ("device", "hardware", "num_hosts", LINK_RATE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evidence:
    """The newest record of every case, and training runs for scaling laws."""

    records: tuple[Record, ...]
    runs: pathlib.Path | None = None
    """File of training runs for the scaling-law question; without one, synthetic runs are used."""

    @classmethod
    def of(cls, records: Sequence[Record], runs: pathlib.Path | None = None) -> "Evidence":
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
    """Returns, for every place, the largest group of records that differ only in `over`.

    A group needs at least one measured record, and its measured records must satisfy `holds`.
    """
    groups: dict[frozenset[tuple[str, CaseValue]], list[Record]] = {}
    left_out = {*over, MEASURED_LINK_RATE}
    for record in records:
        key = frozenset(item for item in record.case.items() if item[0] not in left_out)
        groups.setdefault(key, []).append(record)
    best: dict[tuple[CaseValue, ...], list[Record]] = {}
    for group in groups.values():
        measured = [record for record in group if record.metrics]
        if not measured or not (holds is None or holds(measured)):
            continue
        place = tuple(group[0].case.get(field) for field in _PLACE)
        if place not in best or _weight(group) > _weight(best[place]):
            best[place] = group
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
