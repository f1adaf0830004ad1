"""Executors for the runs of a sweep: this machine, Slurm, or a Ray cluster."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from paceline.workflows.sweep.task import RunTask


class Executor(Protocol):
    """Executes runs. All state of a run is in its directory."""

    def run(self, tasks: Sequence[RunTask]) -> Iterator[str]:
        """Yields the label of each run when it has ended, regardless of its outcome.

        A run that was stopped or killed has not ended, and is not yielded.
        """
