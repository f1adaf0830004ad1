"""One command of a suite, and the records that show whether it has been run."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, TypeAlias

from paceline.core.strategies import BUCKET_STRATEGIES
from paceline.core.units import parse_bytes, parse_rate
from paceline.records import CaseValue, Environment, Record
from paceline.records.kinds import LINK_RATE

SEPARATOR = "; "
"""Separates the names of an attempt's deliverables."""
NUM_MEASURED = "num_measured"
"""Metric of an attempt: the number of expected records that it measured."""
_TOO_LARGE = ("skipped", "out_of_memory")
"""Outcomes that another attempt on the same machine would only repeat."""
_NUM_HOSTS = 2
_FLAGS = {"strategy": "--strategies", "size_bytes": "--sizes"}
"""Flags whose names differ from the case field that they set."""

Values: TypeAlias = CaseValue | tuple[CaseValue, ...]
Fields: TypeAlias = dict[str, Values]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuiteCase:
    """A measurement command for a report; its arguments and expected records derive from it."""

    name: str
    """Unique in a suite."""
    deliverables: tuple[str, ...]
    """Deliverables that use its records."""
    verb: str
    """The command's first words, such as ``bench step``."""
    kind: str
    """The kind of record that it writes."""
    fields: Mapping[str, Values]
    """Case fields that its flags set; a tuple of values gives one record per value."""
    defaults: Mapping[str, CaseValue] = dataclasses.field(default_factory=dict)
    """Further case fields that its records have by default."""
    options: tuple[str, ...] = ()
    """Further arguments that do not appear in its records."""
    seconds: float
    """Approximate duration on the machine that the preset targets."""
    rate: str | None = None
    """Link rate if it runs on two virtual hosts, else None."""
    records_in: Literal["store", "directory"] = "store"
    """Whether the command appends to the store or writes to a separate directory."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments of the command, without the destination of the records."""
        words = self.verb.split()
        for field, values in self.fields.items():
            words.append(_FLAGS.get(field, f"--{field.replace('_', '-')}"))
            if values is not True and field != "compile":
                words += map(str, values if isinstance(values, tuple) else (values,))
        return (*words, *self.options)

    @property
    def lab(self) -> tuple[str, ...]:
        """The arguments of `paceline lab run` if it runs on virtual hosts, else empty."""
        if self.rate is None:
            return ()
        return ("--hosts", str(_NUM_HOSTS), "--rate", self.rate)

    @property
    def command(self) -> str:
        """The command as a user would type it."""
        inner = f"paceline {' '.join(self.arguments)}"
        return f"paceline lab run {' '.join(self.lab)} -- {inner}" if self.lab else inner

    @property
    def expected(self) -> tuple[dict[str, CaseValue], ...]:
        """The case fields of each expected record."""
        links: dict[str, CaseValue] = {}
        if self.rate is not None:
            links = {"num_hosts": _NUM_HOSTS, LINK_RATE: parse_rate(self.rate)}
        return tuple({**self.defaults, **links, **fields} for fields in self._combinations())

    def _combinations(self) -> Iterator[dict[str, CaseValue]]:
        several = (each if isinstance(each, tuple) else (each,) for each in self.fields.values())
        seen = []
        for values in itertools.product(*several):
            fields = dict(zip(self.fields, values, strict=True))
            if "size_bytes" in fields:
                fields["size_bytes"] = parse_bytes(str(fields["size_bytes"]))
            strategy, size = fields.get("strategy"), fields.get("bucket_size_mb")
            if size == "auto" and strategy not in ("bucketed", None):
                continue
            if size is not None and strategy not in BUCKET_STRATEGIES:
                fields["bucket_size_mb"] = None
            if fields not in seen:
                seen.append(fields)
                yield fields

    def leaves(self, record: Record) -> bool:
        """Returns whether a record is one of the expected ones, regardless of its outcome."""
        return any(self._matches(fields, record) for fields in self.expected)

    def _matches(self, fields: Mapping[str, CaseValue], record: Record) -> bool:
        return record.kind == self.kind and all(
            record.case.get(name) == value for name, value in fields.items()
        )

    def is_answered(self, records: Iterable[Record], here: Environment) -> bool:
        """Returns whether another run on this machine would add no information."""
        known = [record for record in records if record.metrics or _was_too_large(record, here)]
        return all(any(self._matches(each, record) for record in known) for each in self.expected)


def is_partial(attempt: Record) -> bool:
    """Returns whether an attempt measured only some of its expected records."""
    measured = attempt.metrics.get(NUM_MEASURED)
    return attempt.outcome != "ok" and measured is not None and measured.value > 0


def _was_too_large(record: Record, here: Environment) -> bool:
    there = record.environment
    return record.outcome in _TOO_LARGE and (there.processor, there.memory_bytes) == (
        here.processor,
        here.memory_bytes,
    )
