"""Where the runs of a sweep are made: this machine, Slurm, or a Ray cluster."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from paceline.workflows.sweep.task import RunTask


class Executor(Protocol):
    """Makes runs. What a run is, and where it stands, is in its directory alone."""

    def run(self, tasks: Sequence[RunTask]) -> Iterator[str]:
        """Yields the label of each run when it has ended, whatever came of it.

        A run that was stopped or killed on the way is passed over: it has not ended.
        """
