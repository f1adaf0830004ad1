"""Runs on a Ray cluster, whose nodes see the sweep's directory.

Ray starts a task again whose worker or node has died, and the run goes on from its checkpoint.
"""

import contextlib
from collections.abc import Iterator, Sequence

from paceline.data.prepare.engines.ray import RayEngine
from paceline.workflows.sweep.task import RunTask, run_task


class RayExecutor:
    """Tasks of a cluster.

    Args:
        address: Where the cluster is; None for RAY_ADDRESS, or else a new one on this machine.
        at_once: Runs at a time; None for what the cluster has cores for.
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
