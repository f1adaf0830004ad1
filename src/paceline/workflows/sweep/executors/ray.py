"""Executes runs on a Ray cluster whose nodes share the sweep's directory.

Ray restarts a task if its worker or node dies, and the run resumes from its checkpoint.
"""

import contextlib
from collections.abc import Iterator, Sequence

from paceline.data.prepare.engines import RayEngine
from paceline.workflows.sweep.task import RunTask, run_task


class RayExecutor:
    """Executes runs as Ray tasks.

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
