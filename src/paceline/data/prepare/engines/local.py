"""An engine of processes on this machine. A worker that dies is replaced and its task retried.

Workers are new interpreters, not forks: a process with threads cannot be forked safely. They die
with the process that started them, regardless of how it ends.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from paceline.core.errors import DataError
from paceline.core.processes import deaf_to_interrupts, end_processes
from paceline.data.prepare.engines import MOST_DEATHS, Result, TaskT

_PROGRAM = "from paceline.data.prepare.engines.worker import main; main({descriptor}, {parent})"


class LocalEngine:
    """A pool of processes; with one worker, tasks run in this process.

    Args:
        num_workers: Number of tasks in flight.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._workers: list[_Worker] = []

    def run(
        self, function: Callable[[TaskT], Result], tasks: Sequence[TaskT]
    ) -> Iterator[tuple[int, Result]]:
        """Yields each task's number and result, in the order in which they finish."""
        if self._num_workers == 1:
            for number, task in enumerate(tasks):
                yield number, function(task)
            return
        waiting = list(range(len(tasks)))[::-1]
        deaths = [0] * len(tasks)
        running: dict[Connection, tuple[_Worker, int]] = {}
        while waiting or running:
            while waiting and len(running) < self._num_workers:
                worker = self._idle_worker(running)
                number = waiting.pop()
                worker.send((function, tasks[number]))
                running[worker.connection] = (worker, number)
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                worker, number = running.pop(ready)
                try:
                    result, error = ready.recv()
                except (EOFError, ConnectionError):
                    deaths[number] += 1
                    self._bury(worker, tasks[number].label, deaths[number])
                    waiting.append(number)
                    continue
                if error is not None:
                    raise error
                yield number, result

    def close(self) -> None:
        """Ends the workers."""
        for worker in self._workers:
            worker.connection.close()
        end_processes([worker.process for worker in self._workers])
        self._workers.clear()

    def _idle_worker(self, running: "dict[Connection, tuple[_Worker, int]]") -> "_Worker":
        for worker in self._workers:
            if worker.connection not in running:
                return worker
        worker = _Worker()
        self._workers.append(worker)
        return worker

    def _bury(self, worker: "_Worker", label: str, num_deaths: int) -> None:
        self._workers.remove(worker)
        worker.connection.close()
        return_code = worker.process.wait()
        if num_deaths > MOST_DEATHS:
            how = signal.Signals(-return_code).name if return_code < 0 else f"code {return_code}"
            raise DataError(
                f"{label}: the worker died {num_deaths} times on this task, the last time by "
                f"{how}; the kernel sends SIGKILL when memory runs out: try fewer --workers"
            )


class _Worker:
    """One process and the connection to it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            program = _PROGRAM.format(descriptor=theirs.fileno(), parent=os.getpid())
            search_path = os.pathsep.join(each for each in sys.path if each)
            with deaf_to_interrupts():
                self.process = subprocess.Popen(
                    [sys.executable, "-c", program],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, "PYTHONPATH": search_path},
                )
        self.connection = Connection(ours.detach())

    def send(self, message: Any) -> None:
        # The death of an idle worker is detected when its result is read.
        with contextlib.suppress(ConnectionError):
            self.connection.send(message)
