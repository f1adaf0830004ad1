"""Runs the missing commands of a suite, each in a separate process.

Invariants: cases that are already in the store are not run again, so an interrupted suite resumes.
A command that fails, hangs or is killed is recorded as an attempt in the store, and the suite
continues with the next one. No command outlives the suite.
"""

import dataclasses
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from paceline.core.processes import (
    end_group,
    error_tail,
    exit_code_of,
    start_child,
    termination_as_exit,
)
from paceline.core.units import format_seconds
from paceline.records import Metric, Outcome, Record, RecordStore, capture_environment
from paceline.records.kinds import ATTEMPT
from paceline.workflows.cases import NUM_MEASURED, SEPARATOR, SuiteCase, is_partial

_SHORTEST_LIMIT_S = 300.0
_SLOWEST = 6.0
"""Time limit of a command, as a multiple of its expected duration."""
_GRACE_S = 10.0
_RECORDS = "records.jsonl"
_INCOMPLETE = "it wrote only some of its records"

Say = Callable[[str], None]


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
                    # A case that failed or hung is no evidence of the machine's speed.
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
