"""One run of a sweep as a task: `paceline train` in a separate process, on any node.

All state is in the run's directory: a task that is restarted after a kill, a lost node or a requeue
resumes from the newest checkpoint, and a task whose run has ended does nothing.
"""

import dataclasses
import os
import pathlib
import sys
import time
from collections.abc import Sequence

from paceline.core.processes import (
    STOPPED,
    end_processes,
    error_tail,
    exit_code_of,
    start_child,
    termination_as_exit,
)
from paceline.data.storage import LocalStorage
from paceline.loop.sweep_directory import ENDED, RunResult, write_result
from paceline.records import Outcome
from paceline.training.config import RunConfig
from paceline.training.run_directory import DIVERGED, METRICS, RECORD
from paceline.training.toml_config import encode_config

_CONFIG = "run.toml"
_LOG = "log.txt"
_POLL_S = 0.1
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
    """A run in a child process, which dies with this one."""

    def __init__(self, task: RunTask) -> None:
        self.task = task
        self._directory = pathlib.Path(task.directory)
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
        code = exit_code_of(self.process.returncode)
        if code == STOPPED or self.process.returncode < 0:
            return False
        write_result(self._directory, self._result(code))
        return True

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


def has_ended(task: RunTask) -> bool:
    """Returns whether a run needs no further attempt."""
    return (pathlib.Path(task.directory) / ENDED).exists()


def run_task(task: RunTask) -> bool:
    """Starts or resumes a run; returns whether it has ended."""
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
