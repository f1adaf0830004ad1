"""One command of a suite, and the records by which it is known to have been run."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Literal

from paceline.records import CaseValue, Environment, Record

SEPARATOR = "; "
"""Between the names of the deliverables that an attempt to measure is for."""
NUM_MEASURED = "num_measured"
"""Metric of an attempt: the expected records that it measured."""
_TOO_LARGE = ("skipped", "out_of_memory")
"""Outcomes that another attempt on the same machine would only repeat."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expected:
    """A record that a command leaves in the store."""

    kind: str
    fields: Mapping[str, CaseValue]
    """What its case must say."""

    def matches(self, record: Record) -> bool:
        """Returns whether a record is this one, whatever came of it."""
        return record.kind == self.kind and all(
            record.case.get(name) == value for name, value in self.fields.items()
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuiteCase:
    """A command that measures something for a report."""

    name: str
    """Unique in a suite."""
    deliverables: tuple[str, ...]
    """What it helps to answer."""
    arguments: tuple[str, ...]
    """Of paceline, without where the records go."""
    expected: tuple[Expected, ...]
    seconds: float
    """How long it takes about, on the machine that the preset is for."""
    lab: tuple[str, ...] = ()
    """Where it runs on virtual hosts, the arguments of paceline lab run."""
    records_in: Literal["store", "directory"] = "store"
    """Whether the command appends to a store, or writes to a directory of its own."""

    @property
    def command(self) -> str:
        """The command as a person would type it."""
        inner = f"paceline {' '.join(self.arguments)}"
        return f"paceline lab run {' '.join(self.lab)} -- {inner}" if self.lab else inner

    def is_answered(self, records: Iterable[Record], here: Environment) -> bool:
        """Returns whether another run would tell nothing new.

        Args:
            records: Of a store.
            here: This machine: what was too large for another may fit.
        """
        known = [record for record in records if record.metrics or _was_too_large(record, here)]
        return all(any(each.matches(record) for record in known) for each in self.expected)

    def leaves(self, record: Record) -> bool:
        """Returns whether a record is one that the command is run for."""
        return any(each.matches(record) for each in self.expected)


def is_partial(attempt: Record) -> bool:
    """Returns whether an attempt measured a part of what it was made for."""
    measured = attempt.metrics.get(NUM_MEASURED)
    return attempt.outcome != "ok" and measured is not None and measured.value > 0


def _was_too_large(record: Record, here: Environment) -> bool:
    there = record.environment
    return record.outcome in _TOO_LARGE and (there.processor, there.memory_bytes) == (
        here.processor,
        here.memory_bytes,
    )
