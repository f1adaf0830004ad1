"""Runs a command under chaos: injects each fault when due, after recovery from the last one.

A run survives a fault if it completes another step in time, with the command restarted if it has
exited. Faults are injected one at a time, so that every effect has one cause. Progress is read from
the metrics file, which gets a row after every step. Every fault and the whole run have a record,
with the result of an audit if one is made.
"""

import contextlib
import dataclasses
import pathlib
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from paceline.core.errors import UsageError
from paceline.core.processes import termination_as_exit
from paceline.lab.faults import FAULTS, Fault, Kind, TargetRun, schedule, small_disk
from paceline.lab.network import Site, sites
from paceline.lab.run import Command, end_all, hosts_of, new_mark
from paceline.records import CaseValue, Environment, Metric, Record
from paceline.records.kinds import NUM_SITES
from paceline.records.store import UNDECODABLE
from paceline.training.metrics import MetricsFile, StepRow
from paceline.training.run_directory import METRICS, audit_run

_TAIL_BYTES = 1 << 16
_POLL_S = 0.1
# A step that was nearly complete may still be logged after a rank has died.
_IN_FLIGHT_S = 0.5
_ORPHANS_S = 5.0
_BACK_OFF_S = 0.5
_POSTPONE_S = 2.0
_FAILURES_IN_A_ROW = 4
"""Number of consecutive starts without a step after which the run is abandoned."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChaosConfig:
    """A run, its faults, and the limits of both."""

    command: tuple[str, ...]
    run: pathlib.Path
    """Directory of the run, `out` of its config."""
    kinds: Mapping[str, Kind]
    """The kinds of faults to inject, by their names in `FAULTS`."""
    for_s: float
    """How long to inject faults; the run is then left to finish."""
    finish_within_s: float = 600.0
    """Time that the run may take to finish after the faults."""
    recover_within_s: float = 120.0
    """Time for the next step after a fault; a fault without a next step counts as lost."""
    steps_between: int = 10
    """Steps that the run must complete after a fault before the next one is injected."""
    seed: int = 0
    any_process: bool = False
    """Whether launchers and helper processes are also killed and stopped, not only ranks."""
    restart: bool = True
    """Whether the command is restarted when it fails."""
    hosts_per_site: int = 0
    """Hosts of each site of the lab, with one process each; 0 to run on this machine."""
    num_sites: int = 1
    """Sites of the lab, which share nothing but their uplinks."""
    disk_bytes: int = 0
    """Size of the disk that is mounted for the run; 0 for none."""
    reference: pathlib.Path | None = None
    """Directory of an undisturbed run, whose losses must be bit-identical to those of this run."""

    def __post_init__(self) -> None:
        if not self.command:
            raise UsageError("nothing to run: put the command after --")
        if not self.kinds:
            raise UsageError("no fault to inject; ask for at least one, such as --kill-every 30s")
        if not (self.for_s > 0 and self.finish_within_s > 0 and self.recover_within_s > 0):
            raise UsageError("--for, --finish-within and --recover-within must be positive")
        if self.steps_between < 1:
            raise UsageError("--steps-between must be at least 1")
        if self.num_sites < 1 or self.hosts_per_site < 0:
            raise UsageError("--sites must be at least 1, and --hosts not negative")
        if self.num_sites > 1 and not self.hosts_per_site:
            raise UsageError("--sites needs virtual hosts; add --hosts 1, which is for every site")
        if self.num_sites < 2 and any(FAULTS[kind].needs_sites for kind in self.kinds):
            raise UsageError("faults of sites need several; add --sites 2 --hosts 1")
        if self.num_hosts < 2 and any(FAULTS[kind].needs_links for kind in self.kinds):
            raise UsageError("link faults need links between virtual hosts; add --hosts 2")

    @property
    def num_hosts(self) -> int:
        """Hosts of the lab; 0 if the command runs on this machine, where no link can fail."""
        return self.num_sites * self.hosts_per_site


class StepProgress:
    """Polls a run's newest step, and records the time at which each step was reached."""

    def __init__(self, run: pathlib.Path, began: float) -> None:
        self._path = run / METRICS
        self._began = began
        self.step = 0
        self.seconds: list[float] = [0.0]
        self.steps: list[int] = [0]
        self.advanced_s = 0.0
        """When the step last increased, in seconds since the start."""

    def look(self) -> int:
        """Returns the newest step; 0 before the first one."""
        step = self._newest()
        now_s = time.monotonic() - self._began
        if step > self.step:
            self.advanced_s = now_s
        if step != self.step:
            # Before a rollback, repeat the old step at the current time, so that a plot shows the
            # pause as a horizontal line.
            self.seconds += [now_s, now_s] if step < self.step else [now_s]
            self.steps += [self.step, step] if step < self.step else [step]
            self.step = step
        return step

    def _newest(self) -> int:
        try:
            with self._path.open("rb") as file:
                file.seek(0, 2)
                file.seek(max(0, file.tell() - _TAIL_BYTES))
                lines = file.read().split(b"\n")
        except OSError:
            return 0
        # The last part is empty or an incomplete line.
        for line in reversed(lines[:-1]):
            try:
                row = msgspec.json.decode(line)
            except UNDECODABLE:
                continue
            if isinstance(row, dict) and row.get("kind") == "step":
                return int(row["step"])
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class InjectedFault:
    """An injected fault and its effect on the run."""

    fault: Fault
    target: str
    at_s: float
    """When the fault began, in seconds since the start."""
    step: int
    """The newest step before the fault."""
    recovery_s: float | None = None
    """Seconds from the end of the fault to the next step; None if there was none."""
    num_starts: int = 0
    """Number of restarts of the command due to the fault."""
    reason: str | None = None
    """Why the run was lost; None if it survived."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChaosOutcome:
    """The outcome of a whole chaos run."""

    injected: list[InjectedFault]
    finished: bool
    """Whether the command ended with exit code 0."""
    reason: str | None
    """Why the command did not finish; None if it did."""
    num_starts: int
    num_orphans: int
    """Number of processes that outlived the command and were killed."""
    duration_s: float
    seconds: list[float]
    steps: list[int]
    """Newest step at each time in `seconds`."""


def run_chaos(config: ChaosConfig) -> ChaosOutcome:
    """Runs a command to completion while injecting the configured faults."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(termination_as_exit())
        if config.disk_bytes:
            stack.enter_context(small_disk(config.run, config.disk_bytes))
        made: Sequence[Site] = ()
        if config.num_hosts:
            made = stack.enter_context(sites(config.num_sites, config.hosts_per_site))
        return _Chaos(config, made).play()


class _Chaos:
    def __init__(self, config: ChaosConfig, made: Sequence[Site]) -> None:
        self._config = config
        self._mark = new_mark()
        self._command = Command(config.command, self._mark, hosts_of(made))
        self._target = TargetRun(
            directory=config.run, mark=self._mark, sites=made, any_process=config.any_process
        )
        self._began = time.monotonic()
        self._progress = StepProgress(config.run, self._began)
        self._started_s = 0.0
        self._failures = 0
        self._resumed_step = 0
        self._injected: list[InjectedFault] = []

    @property
    def _now_s(self) -> float:
        return time.monotonic() - self._began

    def play(self) -> ChaosOutcome:
        reason: str | None = "interrupted"
        try:
            self._command.start()
            reason = self._disturb_until_done()
        finally:
            if reason is not None:
                self._command.terminate()
            orphans = end_all(self._mark, _ORPHANS_S)
        # Processes killed because the run did not finish do not count as orphans.
        return ChaosOutcome(
            injected=self._injected,
            finished=reason is None,
            reason=reason,
            num_starts=self._command.starts,
            num_orphans=0 if reason else len(orphans),
            duration_s=self._now_s,
            seconds=self._progress.seconds,
            steps=self._progress.steps,
        )

    def _disturb_until_done(self) -> str | None:
        """Returns why the run did not finish; None if it did."""
        config = self._config
        due = deque(schedule(config.kinds, seed=config.seed, for_s=config.for_s))
        while True:
            done, reason = self._supervise()
            if done:
                return reason
            if self._now_s > config.for_s + config.finish_within_s:
                return f"not finished after {self._now_s:.0f} s; allow more with --finish-within"
            if self._now_s > config.for_s:
                due.clear()
            if due and self._now_s >= due[0].due_s and self._has_moved():
                fault = due.popleft()
                injected = self._inject(fault)
                if injected is None:
                    due.appendleft(dataclasses.replace(fault, due_s=self._now_s + _POSTPONE_S))
                    continue
                self._injected.append(injected)
                self._resumed_step = self._progress.step
                _say(injected)
                if injected.reason is not None:
                    return f"fault {fault.number} ({fault.kind}): {injected.reason}"
            time.sleep(_POLL_S)

    def _has_moved(self) -> bool:
        """Returns whether the run has made enough steps since its last start or fault."""
        enough = self._resumed_step + self._config.steps_between
        return self._progress.advanced_s > self._started_s and self._progress.step >= enough

    def _supervise(self) -> tuple[bool, str | None]:
        """Polls progress and command, and restarts it if it failed.

        Returns whether the run is over, and the reason if it failed.
        """
        self._progress.look()
        code = self._command.exit_code()
        if code is None:
            return False, None
        if code == 0:
            return True, None
        if not self._config.restart:
            return True, f"the command ended with exit code {code}"
        self._failures = 0 if self._progress.advanced_s > self._started_s else self._failures + 1
        if self._failures >= _FAILURES_IN_A_ROW:
            return True, f"{self._failures} starts without a step; the last exit code was {code}"
        time.sleep(_BACK_OFF_S)
        self._started_s = self._now_s
        self._command.start()
        return False, None

    def _inject(self, fault: Fault) -> InjectedFault | None:
        """Injects a fault and waits for the next step; returns None if there was no target."""
        starts = self._command.starts
        began_s, step = self._now_s, self._progress.look()
        with FAULTS[fault.kind].inject(self._target, fault) as target:
            if target is None:
                return None
            # A command that fails during the fault is restarted after it.
            while self._now_s < began_s + fault.lasts_s:
                self._progress.look()
                time.sleep(_POLL_S)
        injected = InjectedFault(fault=fault, target=target, at_s=began_s, step=step)
        over_s = self._now_s
        deadline_s = over_s + self._config.recover_within_s
        while self._now_s < deadline_s:
            done, reason = self._supervise()
            recovered = self._progress.advanced_s > over_s + _IN_FLIGHT_S or (done and not reason)
            if recovered or done:
                return dataclasses.replace(
                    injected,
                    recovery_s=None if reason else max(self._progress.advanced_s - over_s, 0.0),
                    num_starts=self._command.starts - starts,
                    reason=reason,
                )
            time.sleep(_POLL_S)
        late = f"no step within {self._config.recover_within_s:.0f} s"
        return dataclasses.replace(injected, num_starts=self._command.starts - starts, reason=late)


def _say(injected: InjectedFault) -> None:
    recovery_s = injected.recovery_s
    became = "lost" if recovery_s is None else f"next step after {recovery_s:.1f} s"
    sys.stderr.write(
        f"paceline chaos: {injected.at_s:.0f} s, step {injected.step:,}: {injected.fault.kind}, "
        f"{injected.target}: {became}\n"
    )


FAULT = "chaos_fault"
RUN = "chaos_run"
_MOST_SAMPLES = 2_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChaosAudit:
    """Findings of an audit; empty if the run is equivalent to an undisturbed one."""

    num_steps: int
    """Number of steps whose samples were re-read."""
    findings: tuple[str, ...]


def audit_chaos(run: pathlib.Path, reference: pathlib.Path | None) -> ChaosAudit:
    """Checks that every sample was used exactly once, and compares losses with `reference`."""
    num_steps, wrong = audit_run(run)
    findings = [str(finding) for finding in wrong]
    if reference is not None:
        findings += _differences(_losses(run), _losses(reference), reference)
    return ChaosAudit(num_steps=num_steps, findings=tuple(findings))


def _losses(run: pathlib.Path) -> dict[int, float]:
    return {
        row.step: row.loss for row in MetricsFile(run / METRICS).read() if isinstance(row, StepRow)
    }


def _differences(
    losses: dict[int, float], expected: dict[int, float], reference: pathlib.Path
) -> list[str]:
    different = [step for step in expected if losses.get(step) != expected[step]]
    if different:
        return [
            f"{len(different)} of {len(expected)} losses differ from those of {reference}, the "
            f"first at step {min(different)}"
        ]
    if len(losses) > len(expected):
        return [f"{len(losses)} steps, but {reference} has only {len(expected)}"]
    return []


def chaos_records(
    config: ChaosConfig, outcome: ChaosOutcome, audit: ChaosAudit | None, environment: Environment
) -> Iterator[Record]:
    """Yields the records of a run's faults, then the record of the run."""
    case: dict[str, CaseValue] = {
        "command": " ".join(config.command),
        "seed": config.seed,
        "num_hosts": config.num_hosts,
    }
    if config.num_sites > 1:
        case[NUM_SITES] = config.num_sites
    for injected in outcome.injected:
        yield _fault_record(case, injected, environment)
    lost = [injected for injected in outcome.injected if injected.reason is not None]
    findings = () if audit is None else audit.findings
    wrong = [*([outcome.reason] if outcome.reason else []), *findings]
    if outcome.num_orphans:
        wrong.append(f"{outcome.num_orphans} processes outlived the command")
    stride = -(-len(outcome.steps) // _MOST_SAMPLES)
    yield Record(
        kind=RUN,
        case={**case, "for_s": config.for_s},
        environment=environment,
        metrics={
            "tried": Metric(value=len(outcome.injected)),
            "survived": Metric(value=len(outcome.injected) - len(lost)),
            "lost": Metric(value=len(lost)),
            "duration_s": Metric(value=outcome.duration_s),
            "num_starts": Metric(value=outcome.num_starts),
            "num_orphans": Metric(value=outcome.num_orphans),
            "audited_steps": Metric(value=0 if audit is None else audit.num_steps),
            "progress_s": Metric.from_samples(outcome.seconds[::stride]),
            "progress_step": Metric.from_samples([float(s) for s in outcome.steps[::stride]]),
        },
        outcome="failed" if wrong else "ok",
        reason="; ".join(wrong) or None,
    )


def _fault_record(
    case: dict[str, CaseValue], injected: InjectedFault, environment: Environment
) -> Record:
    metrics = {
        "at_s": injected.at_s,
        "lasts_s": injected.fault.lasts_s,
        "step": float(injected.step),
        "num_starts": float(injected.num_starts),
        **({} if injected.recovery_s is None else {"recovery_time_s": injected.recovery_s}),
    }
    return Record(
        kind=FAULT,
        case={
            **case,
            "fault": injected.fault.kind,
            "number": injected.fault.number,
            "target": injected.target,
        },
        environment=environment,
        metrics={name: Metric(value=value) for name, value in metrics.items()},
        outcome="ok" if injected.reason is None else "failed",
        reason=injected.reason,
    )
