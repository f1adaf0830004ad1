"""The benchmark suite: its cases, and running those that the store lacks, each in its own process.

A case defines both a command line and the records that show whether it has been run, so that the
two cannot diverge.

Invariants: cases that are already in the store are not run again, so an interrupted suite resumes.
A command that fails, hangs or is killed is recorded as an attempt in the store, and the suite
continues with the next one. No command outlives the suite.
"""

import dataclasses
import itertools
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

from paceline.core.processes import (
    end_group,
    error_tail,
    exit_code_of,
    start_child,
    termination_as_exit,
)
from paceline.core.strategies import BUCKET_STRATEGIES
from paceline.core.units import format_seconds, parse_bytes, parse_rate
from paceline.records import (
    CaseValue,
    Environment,
    Metric,
    Outcome,
    Record,
    RecordStore,
    capture_environment,
)
from paceline.records.kinds import ATTEMPT, LINK_RATE

SEPARATOR = "; "
"""Separates the names of an attempt's deliverables."""
NUM_MEASURED = "num_measured"
"""Metric of an attempt: the number of expected records that it measured."""
_TOO_LARGE = ("skipped", "out_of_memory")
"""Outcomes that another attempt on the same machine would only repeat."""
_NUM_HOSTS = 2
_FLAGS = {"strategy": "--strategies", "size_bytes": "--sizes"}
"""Flags whose names differ from the case field that they set."""
_SHORTEST_LIMIT_S = 300.0
_SLOWEST = 6.0
"""Time limit of a command, as a multiple of its expected duration."""
_GRACE_S = 10.0
_RECORDS = "records.jsonl"
_INCOMPLETE = "it wrote only some of its records"

Values: TypeAlias = CaseValue | tuple[CaseValue, ...]
Fields: TypeAlias = dict[str, Values]
Say = Callable[[str], None]


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
            if size == "auto" and strategy not in ("ddp", None):
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suite:
    """A suite and the destination of its results."""

    cases: Sequence[SuiteCase]
    store: RecordStore
    workspace: pathlib.Path
    """Directory for logs and other output of the commands."""

    def missing(self) -> list[SuiteCase]:
        """Returns the cases that have records missing in the store."""
        records, here = self._records(), capture_environment()
        return [case for case in self.cases if not case.is_answered(records, here)]

    def run(self, say: Say) -> int:
        """Runs the missing cases, reports progress, and returns the number of failures."""
        missing = self.missing()
        done = len(self.cases) - len(missing)
        if done:
            say(f"{done} of {len(self.cases)} cases are already in {self.store.path}")
        num_failed = 0
        taken_s = estimated_s = 0.0
        with termination_as_exit():
            for number, case in enumerate(missing, start=1):
                left_s = sum(each.seconds for each in missing[number - 1 :])
                pace = taken_s / estimated_s if estimated_s else 1.0
                say(
                    f"[{number}/{len(missing)}, about {_minutes(left_s * pace)} left] "
                    f"{case.command}"
                )
                attempt = self._attempt(case, _limit_s(case, pace))
                has_failed = attempt.outcome != "ok" and not is_partial(attempt)
                num_failed += has_failed
                case_s = attempt.metrics["time_s"].value
                if not has_failed:
                    # A case that failed or hung says nothing about the machine's speed.
                    taken_s += case_s
                    estimated_s += case.seconds
                say(f"  {_ending(attempt)} ({format_seconds(case_s)})")
        return num_failed

    def _attempt(self, case: SuiteCase, limit_s: float) -> Record:
        """Runs a case and records the outcome as an attempt."""
        begin = time.monotonic()
        num_before = len(self._records())
        outcome, reason = self._run(case, limit_s)
        records, here = self._records(), capture_environment()
        left = [record for record in records[num_before:] if case.leaves(record)]
        obstacle = next((record for record in reversed(left) if not record.metrics), None)
        if obstacle is not None:
            outcome, reason = obstacle.outcome, obstacle.reason or reason
        elif outcome == "ok" and not left:
            outcome, reason = "failed", "it wrote none of its records"
        num_measured = sum(bool(record.metrics) for record in left)
        if num_measured and case.is_answered(records, here):
            # If anything was measured, sizes that were too large are a valid part of the result.
            outcome, reason = "ok", None
        elif num_measured:
            outcome = "failed" if outcome == "ok" else outcome
            reason = f"{reason or _INCOMPLETE} (partial results kept)"
        attempt = Record(
            kind=ATTEMPT,
            case={
                "name": case.name,
                "deliverables": SEPARATOR.join(case.deliverables),
                "command": case.command,
            },
            environment=here,
            metrics={
                "time_s": Metric(value=time.monotonic() - begin),
                NUM_MEASURED: Metric(value=num_measured),
            },
            outcome=outcome,
            reason=reason,
        )
        self.store.append(attempt)
        return attempt

    def _run(self, case: SuiteCase, limit_s: float) -> tuple[Outcome, str | None]:
        directory = self.workspace / case.name
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        log = directory / "log.txt"
        process = start_child(self._command_line(case, directory), log=log, start_new_session=True)
        try:
            return_code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return_code = None
        finally:
            end_group(process, grace_s=_GRACE_S)
        if case.records_in == "directory" and (directory / _RECORDS).exists():
            records = list(RecordStore(directory / _RECORDS).read())
            # Append the expected records last: if they are in the store, so are the others.
            for record in sorted(records, key=case.leaves):
                self.store.append(record)
        if return_code is None:
            return "timeout", f"timed out after {format_seconds(limit_s)}"
        if return_code == 0:
            return "ok", None
        return "failed", error_tail(log, exit_code_of(return_code))

    def _command_line(self, case: SuiteCase, directory: pathlib.Path) -> list[str]:
        # Use the running Paceline, not the installed script.
        paceline = [sys.executable, "-m", "paceline"]
        where = ["--out", str(directory.resolve())]
        if case.records_in == "store":
            where = ["--store", str(self.store.path.resolve())]
        inner = [*paceline, *case.arguments, *where]
        return [*paceline, "lab", "run", *case.lab, "--", *inner] if case.lab else inner

    def _records(self) -> list[Record]:
        return list(self.store.read()) if self.store.path.exists() else []


def _limit_s(case: SuiteCase, pace: float) -> float:
    """Returns the time limit of a case, scaled up if earlier cases exceeded their estimates."""
    return max(_SHORTEST_LIMIT_S, _SLOWEST * case.seconds) * max(1.0, pace)


def _ending(attempt: Record) -> str:
    if attempt.reason is None:
        return "done"
    return f"{'incomplete' if is_partial(attempt) else 'failed'}: {attempt.reason}"


def _minutes(seconds: float) -> str:
    return f"{max(seconds, 1.0):.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
