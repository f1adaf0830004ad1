"""One run of a sweep as a task: `paceline train` in a process of its own, wherever that is.

The run's directory tells all: who starts the task again after a kill, a lost node or a requeue goes
on from the newest checkpoint, and a task whose run has ended does nothing.
"""

import dataclasses
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence

from paceline.core.processes import (
    STOPPED,
    die_with_parent,
    end_processes,
    exit_code_of,
    termination_as_exit,
)
from paceline.training.run_files import DIVERGED, RECORD
from paceline.workflows.last_words import last_words
from paceline.workflows.sweep.directory import ENDED, Ending, write_ending

_LOG = "log.txt"
_POLL_S = 0.1
_GRACE_S = 30.0
"""For a run to save in when it is asked to stop."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunTask:
    """A run to make."""

    label: str
    """The run's name."""
    directory: str
    """The run's directory, which its node sees."""
    config: str
    """Its run.toml."""
    ranks: int
    """Ranks that train it."""
    threads: int
    """Threads of each rank."""


class StartedRun:
    """A run that is being made by a process of its own, which dies with this one.

    Args:
        task: The run; its directory has its config.
    """

    def __init__(self, task: RunTask) -> None:
        self.task = task
        self._directory = pathlib.Path(task.directory)
        self._began = time.monotonic()
        command = [sys.executable, "-m", "paceline", "train", task.config]
        command += ["--ranks", str(task.ranks), "--json"]
        parent = os.getpid()
        with (self._directory / _LOG).open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(task.threads),
                # A Ctrl-C reaches the sweep alone, which asks its runs to save and stop.
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(parent),
            )

    def poll(self) -> bool | None:
        """Returns whether the run has ended; None while it is being made.

        A run that was asked to stop, or killed, has not ended: it goes on when it is started again.
        """
        if self.process.poll() is None:
            return None
        code = exit_code_of(self.process.returncode)
        if code == STOPPED or self.process.returncode < 0:
            return False
        write_ending(self._directory, _ending(self._directory, code, self._seconds()))
        return True

    def _seconds(self) -> float:
        return time.monotonic() - self._began


def stop_runs(runs: Sequence[StartedRun]) -> None:
    """Asks runs to save what they have, and waits until they have stopped."""
    end_processes([run.process for run in runs], grace_s=_GRACE_S)


def has_ended(task: RunTask) -> bool:
    """Returns whether a run needs no further attempt."""
    return (pathlib.Path(task.directory) / ENDED).exists()


def run_task(task: RunTask) -> bool:
    """Makes a run, or goes on with it; returns whether it has ended."""
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


def _ending(directory: pathlib.Path, code: int, time_s: float) -> Ending:
    if (directory / RECORD).exists():
        return Ending(outcome="ok", time_s=time_s)
    reason = last_words(directory / _LOG, code)
    if (directory / DIVERGED).exists():
        return Ending(outcome="diverged", reason=reason, time_s=time_s)
    return Ending(outcome="failed", reason=reason, time_s=time_s)


def _environment(threads: int) -> dict[str, str]:
    """Returns the variables of a run, which has nothing to do with what launched the sweep."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return kept | {"OMP_NUM_THREADS": str(threads)}
