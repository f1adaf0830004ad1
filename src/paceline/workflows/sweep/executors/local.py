"""Executes runs on this machine, several at a time, in processes that end with the sweep."""

import collections
import time
from collections.abc import Callable, Iterator, Sequence

from paceline.workflows.sweep.task import RunTask, StartedRun, stop_runs

_POLL_S = 0.1


class LocalExecutor:
    """Executes runs as local processes.

    Args:
        at_once: Number of concurrent runs.
        on_wait: Called on every poll with the active runs.
    """

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
