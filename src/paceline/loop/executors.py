"""Executors for the runs of a sweep: this machine, Slurm, or a Ray cluster.

A run is a task: `paceline train` in a separate process, on any node. All its state is in its
directory, which every node sees: a run that a kill, a lost node, a preemption or a time limit
interrupts resumes from its newest checkpoint, and the task of a run that has ended does nothing.

On this machine, the number of concurrent runs is measured: small models do not saturate several
cores, and concurrent runs compete for memory bandwidth.
"""

import collections
import contextlib
import dataclasses
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import msgspec

from paceline.core.errors import PacelineError, UsageError
from paceline.core.host import available_processors, threads_per_rank
from paceline.core.lock import owned
from paceline.core.processes import (
    STOP_CODES,
    end_processes,
    error_tail,
    exit_code_of,
    start_child,
    termination_as_exit,
)
from paceline.data.prepare.engines import RayEngine
from paceline.data.storage import LocalStorage
from paceline.loop.run_config import run_config
from paceline.loop.sweep_design import PlannedRun
from paceline.loop.sweep_directory import (
    ENDED,
    RunResult,
    SweepDirectory,
    SweepState,
    read_result,
    write_result,
)
from paceline.records import Outcome
from paceline.training.config import RunConfig
from paceline.training.run_directory import DIVERGED, METRICS, RECORD, last_record
from paceline.training.toml_config import encode_config

_COMMAND = "a run of paceline sweep"
_CONFIG = "run.toml"
_LOG = "log.txt"
_POLL_S, _SLURM_POLL_S = 0.1, 1.0
_GRACE_S = 30.0
"""Time for a run to save a checkpoint when asked to stop."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunTask:
    """A run to execute."""

    label: str
    """The run's name."""
    directory: str
    """The run's directory, visible to its node."""
    config: str
    """Path of its run.toml."""
    ranks: int
    """Number of ranks."""
    threads: int
    """Threads per rank."""


def make_task(label: str, config: RunConfig, *, ranks: int, threads: int) -> RunTask:
    """Writes the config into the run's directory, and returns the task that trains it."""
    directory = pathlib.Path(config.out).resolve()
    LocalStorage(directory).write(_CONFIG, encode_config(config).encode())
    return RunTask(
        label=label,
        directory=str(directory),
        config=str(directory / _CONFIG),
        ranks=ranks,
        threads=threads,
    )


class StartedRun:
    """A run in a child process, which dies with this one.

    This process owns the run's directory meanwhile: a run that somebody else has started there is
    an error of the sweep, and never taken for a failed run.
    """

    def __init__(self, task: RunTask) -> None:
        self.task = task
        self._directory = pathlib.Path(task.directory)
        self._ownership = contextlib.ExitStack()
        self._ownership.enter_context(owned(self._directory, _COMMAND))
        self._began = time.monotonic()
        self._is_resumed = (self._directory / METRICS).exists()
        command = [sys.executable, "-m", "paceline", "train", task.config]
        command += ["--ranks", str(task.ranks), "--json"]
        self.process = start_child(
            command,
            log=self._directory / _LOG,
            env=_environment(task.threads),
            # Ctrl-C reaches only the sweep, which then asks its runs to save and stop.
            start_new_session=True,
        )

    def poll(self) -> bool | None:
        """Returns whether the run has ended; None while it is running.

        A run that was asked to stop, or was killed, has not ended: it resumes when restarted.
        """
        if self.process.poll() is None:
            return None
        with self._ownership:
            code = exit_code_of(self.process.returncode)
            if code in STOP_CODES or self.process.returncode < 0:
                return False
            write_result(self._directory, self._result(code))
            return True

    def close(self) -> None:
        """Gives up the run's directory, once the process has ended."""
        self._ownership.close()

    def _result(self, code: int) -> RunResult:
        outcome: Outcome = "ok"
        reason = None
        if not (self._directory / RECORD).exists():
            outcome = "diverged" if (self._directory / DIVERGED).exists() else "failed"
            reason = error_tail(self._directory / _LOG, code)
        return RunResult(
            outcome=outcome,
            reason=reason,
            time_s=time.monotonic() - self._began,
            is_resumed=self._is_resumed,
        )


def stop_runs(runs: Sequence[StartedRun]) -> None:
    """Asks runs to save a checkpoint, and waits until they have stopped."""
    end_processes([run.process for run in runs], grace_s=_GRACE_S)
    for run in runs:
        run.close()


def has_ended(task: RunTask) -> bool:
    """Returns whether a run needs no further attempt."""
    return (pathlib.Path(task.directory) / ENDED).exists()


def run_task(task: RunTask) -> bool:
    """Starts or resumes a run; returns whether it has ended."""
    # A job of a sweep that was killed may still be training this run.
    with owned(task.directory, _COMMAND, longest_wait_s=math.inf):
        if has_ended(task):
            return True
        run = StartedRun(task)
        try:
            with termination_as_exit():
                while (state := run.poll()) is None:
                    time.sleep(_POLL_S)
                return state
        finally:
            stop_runs([run])


def _environment(threads: int) -> dict[str, str]:
    """Returns the environment of a run, without the variables of a Slurm job around the sweep."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return kept | {"OMP_NUM_THREADS": str(threads)}


_SLURM_LOGS = "slurm"
_FORGOTTEN = "Invalid job id"
_MEASURED_STEPS = 40
MOST_ATTEMPTS = 3
"""Number of attempts that may be killed before a run counts as failed."""


class Executor(Protocol):
    """Executes runs. All state of a run is in its directory."""

    def run(self, tasks: Sequence[RunTask]) -> Iterator[str]:
        """Yields the label of each run when it has ended, regardless of its outcome.

        A run that was stopped or killed has not ended, and is not yielded.
        """


class LocalExecutor:
    """Executes runs as local processes, `at_once` at a time; every poll calls `on_wait`."""

    def __init__(
        self, at_once: int, on_wait: Callable[[Sequence[RunTask]], None] = lambda _running: None
    ) -> None:
        self._at_once = at_once
        self._on_wait = on_wait

    def run(self, tasks: Sequence[RunTask]) -> Iterator[str]:
        """Yields the label of each run when it has ended."""
        waiting, running = collections.deque(tasks), list[StartedRun]()
        try:
            while waiting or running:
                while waiting and len(running) < self._at_once:
                    running.append(StartedRun(waiting.popleft()))
                for run in list(running):
                    has_ended = run.poll()
                    if has_ended is None:
                        continue
                    running.remove(run)
                    if has_ended:
                        yield run.task.label
                self._on_wait([run.task for run in running])
                time.sleep(_POLL_S)
        finally:
            stop_runs(running)


class RayExecutor:
    """Executes runs as Ray tasks, which Ray restarts if their worker or node dies.

    Args:
        address: Address of the cluster; None for RAY_ADDRESS, or else a new local cluster.
        at_once: Number of concurrent runs; None for as many as the cluster has cores for.
    """

    def __init__(self, address: str | None, at_once: int | None) -> None:
        self._address = address
        self._at_once = at_once

    def run(self, tasks: Sequence[RunTask]) -> Iterator[str]:
        """Yields the label of each run when it has ended."""
        with contextlib.closing(RayEngine(self._address, self._at_once)) as engine:
            for number, has_ended in engine.run(run_task, tasks):
                if has_ended:
                    yield tasks[number].label


class SlurmExecutor:
    """Executes runs as a job array through submitit, with jobs that may be requeued.

    Whether a run has ended is read from its directory, not from Slurm's accounting (sacct), which
    many clusters lack. Slurm only reports which jobs are pending or running.

    Args:
        directory: The sweep's directory, shared by all nodes.
        at_once: Number of concurrent jobs; None for as many as Slurm starts.
        partition: Partition for the jobs; None for the default.
        time_limit_min: Time limit of a job in minutes.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        at_once: int | None,
        partition: str | None,
        time_limit_min: int,
    ) -> None:
        try:
            import submitit
        except ModuleNotFoundError as error:
            raise UsageError(
                "--executor slurm needs the package submitit; pip install 'paceline[slurm]'"
            ) from error
        self._executor = submitit.SlurmExecutor(folder=directory.resolve() / _SLURM_LOGS)
        self._at_once = at_once
        self._options = {} if partition is None else {"partition": partition}
        self._time_limit_min = time_limit_min

    def run(self, tasks: Sequence[RunTask]) -> Iterator[str]:
        """Yields the label of each run when it has ended."""
        self._executor.update_parameters(
            job_name="paceline-sweep",
            nodes=1,
            ntasks_per_node=1,
            cpus_per_task=tasks[0].ranks * tasks[0].threads,
            time=self._time_limit_min,
            array_parallelism=self._at_once or len(tasks),
            additional_parameters={"requeue": True},
            **self._options,
        )
        jobs = self._executor.map_array(run_task, tasks)
        waiting = {job.job_id: task for job, task in zip(jobs, tasks, strict=True)}
        array = jobs[0].job_id.partition("_")[0]
        try:
            while waiting:
                # Query Slurm before the directories: a job that is gone has written everything.
                alive = _alive(array)
                for job_id, task in list(waiting.items()):
                    if has_ended(task):
                        del waiting[job_id]
                        yield task.label
                    elif alive is not None and job_id not in alive:
                        del waiting[job_id]
                time.sleep(_SLURM_POLL_S)
        finally:
            if waiting:
                subprocess.run(["scancel", array], check=False)


def _alive(array: str) -> set[str] | None:
    """Returns the pending and running jobs of an array, such as 12_3; None if Slurm is silent."""
    listed = subprocess.run(
        ["squeue", "--noheader", "--array", f"--jobs={array}", "--format=%F_%K"],
        capture_output=True,
        text=True,
    )
    # Slurm forgets an array some time after its last job has ended. Any other failure, such as a
    # controller that restarts, does not mean that the jobs are gone.
    if listed.returncode and _FORGOTTEN not in listed.stderr:
        return None
    return set(listed.stdout.split())


def run_to_end(executor: Executor, tasks: Sequence[RunTask]) -> Iterator[str]:
    """Yields the label of each run when it has ended; gives up a run that is killed three times."""
    for _attempt in range(MOST_ATTEMPTS):
        missing = [task for task in tasks if not has_ended(task)]
        if not missing:
            return
        yield from executor.run(missing)


def runs_at_once(
    directory: SweepDirectory,
    state: SweepState,
    ranks: int,
    wanted: int | None,
    say: Callable[[str], None],
) -> int:
    """Returns the number of concurrent runs, and stores it in the sweep's state.

    It is the user's, or else the faster of one and one per core, measured once per sweep.
    """
    at_once = wanted or state.at_once
    if at_once is None:
        at_once = _best_at_once(directory.base(), state.runs[0], ranks)
        say(f"concurrent runs: {at_once}, measured to be the fastest on this machine")
    if at_once != state.at_once:
        directory.keep(msgspec.structs.replace(state, at_once=at_once))
    return at_once


def _best_at_once(base: RunConfig, run: PlannedRun, ranks: int) -> int:
    most = max(1, available_processors() // ranks)
    if most == 1:
        return 1
    rates = {at_once: _runs_per_s(base, run, ranks, at_once) for at_once in (1, most)}
    return max(rates, key=rates.__getitem__)


def _runs_per_s(base: RunConfig, run: PlannedRun, ranks: int, at_once: int) -> float:
    """Returns the throughput of a run's first steps, trained several times at once."""
    short = run.first_steps(_MEASURED_STEPS)
    with tempfile.TemporaryDirectory() as directory:
        tasks = [
            make_task(
                f"throughput {number}",
                run_config(base, short, pathlib.Path(directory) / str(number)),
                ranks=ranks,
                threads=threads_per_rank(ranks * at_once),
            )
            for number in range(at_once)
        ]
        for _label in LocalExecutor(at_once).run(tasks):
            pass
        return sum(1 / _step_time_s(pathlib.Path(task.directory)) for task in tasks)


def _step_time_s(directory: pathlib.Path) -> float:
    result = read_result(directory)
    if result is None or result.outcome != "ok":
        reason = "killed" if result is None else result.reason
        raise PacelineError(f"measuring how many runs to train at once failed: {reason}")
    return last_record(directory).metrics["step_time_s"].value
