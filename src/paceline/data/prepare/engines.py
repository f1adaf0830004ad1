"""Engines that run tasks: processes on this machine, or a Ray cluster.

An engine only decides where and when a task runs. Tasks are pure functions of files, so the engine
cannot affect their results. A task whose worker or node died is retried.

Local workers are new interpreters, not forks: a process with threads cannot be forked safely. They
die with the process that started them, regardless of how it ends. The nodes of a Ray cluster need
this package and access to the same files.
"""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol, TypeVar

from paceline.core.errors import DataError, PacelineError, UsageError
from paceline.core.processes import end_processes, ignore_sigint, start_child
from paceline.data.prepare.config import PrepareConfig
from paceline.data.prepare.job import Result, Task

TaskT = TypeVar("TaskT", bound=Task)

MOST_DEATHS = 3
"""Number of times that a task is retried after its worker died."""
_PROGRAM = "from paceline.data.prepare.engines import main; main({descriptor})"
_TASKS_PER_CORE = 2
"""Tasks in flight on Ray: one running and one queued, so that no core waits for the driver. A plan
may have 65,536."""
_CONNECT_S = 5.0


class Engine(Protocol):
    """Runs tasks."""

    def run(
        self, function: Callable[[TaskT], Result], tasks: Sequence[TaskT]
    ) -> Iterator[tuple[int, Result]]:
        """Yields each task's number and result, in the order in which they finish."""

    def close(self) -> None:
        """Ends the workers."""


def open_engine(config: PrepareConfig) -> contextlib.closing[Engine]:
    """Returns a context with the configured engine, at whose end its workers end."""
    if config.engine == "ray":
        return contextlib.closing(RayEngine(config.ray_address, config.workers))
    return contextlib.closing(LocalEngine(config.num_local_workers))


class LocalEngine:
    """A pool of processes; with one worker, tasks run in this process."""

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
            program = _PROGRAM.format(descriptor=theirs.fileno())
            search_path = os.pathsep.join(each for each in sys.path if each)
            with ignore_sigint():
                self.process = start_child(
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


def main(descriptor: int) -> None:
    """Runs tasks from the connection until it is closed."""
    with Connection(descriptor) as connection:
        while True:
            try:
                function, task = connection.recv()
            except EOFError:
                return
            answer: tuple[object, Exception | None]
            try:
                answer = (function(task), None)
            except PacelineError as error:
                answer = (None, error)
            except Exception as error:
                # Tracebacks are lost between processes, so they are attached as notes.
                error.add_note(f"in worker {os.getpid()}:\n{traceback.format_exc()}")
                answer = (None, error)
            connection.send(answer)


class RayEngine:
    """Runs tasks on a cluster.

    Args:
        address: Address of the cluster; None for RAY_ADDRESS, or else a new one on this machine.
        num_workers: Number of tasks in flight; None for two per core of the cluster.
    """

    def __init__(self, address: str | None, num_workers: int | None) -> None:
        try:
            import ray
        except ModuleNotFoundError as error:
            raise UsageError(
                "--engine ray needs the package ray; pip install 'paceline[ray]'"
            ) from error
        self._ray = ray
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            # Ray sends usage statistics to its developers by default.
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            _require_answer(address)
            ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
        num_cores = int(ray.cluster_resources().get("CPU", 1))
        self._most_in_flight = num_workers or _TASKS_PER_CORE * num_cores

    def run(
        self, function: Callable[[TaskT], Result], tasks: Sequence[TaskT]
    ) -> Iterator[tuple[int, Result]]:
        """Yields each task's number and result, in the order in which they finish."""
        ray = self._ray
        remote = ray.remote(num_cpus=1, max_retries=MOST_DEATHS)(function)
        in_flight: dict[Any, int] = {}
        next_task = 0
        while next_task < len(tasks) or in_flight:
            while next_task < len(tasks) and len(in_flight) < self._most_in_flight:
                in_flight[remote.remote(tasks[next_task])] = next_task
                next_task += 1
            finished, _ = ray.wait(list(in_flight), num_returns=1)
            for reference in finished:
                number = in_flight.pop(reference)
                yield number, self._result(reference, tasks[number].label)

    def close(self) -> None:
        """Disconnects from Ray if this engine connected; ends a cluster that it started."""
        if self._is_ours:
            self._ray.shutdown()

    def _result(self, reference: Any, label: str) -> Any:
        exceptions = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from None
        except exceptions.RayError as error:
            first_line = str(error).strip().partition("\n")[0]
            raise DataError(f"{label}: Ray lost this task: {first_line}") from error


def _require_answer(address: str | None) -> None:
    """Raises a `UsageError` if HOST:PORT does not answer; Ray itself would try for a minute."""
    host, colon, port = (address or "").rpartition(":")
    if not colon or not port.isdigit() or "://" in host:
        return  # Ray resolves other forms of addresses.
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except OSError as error:
        raise UsageError(
            f"--ray-address {address}: no cluster answers there; `ray start --head` starts one"
        ) from error
