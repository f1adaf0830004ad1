"""An engine on a Ray cluster, whose nodes need this package and access to the same files.

Ray retries a task whose worker or node died. Only enough tasks to keep every core busy are in
flight, because a plan may have 65,536.
"""

import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from paceline.core.errors import DataError, UsageError
from paceline.data.prepare.engines import MOST_DEATHS, Result, TaskT

_TASKS_PER_CORE = 2
"""One running and one queued, so that no core waits for the driver."""
_CONNECT_S = 5.0


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
