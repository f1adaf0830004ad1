"""Engines that run tasks: processes on this machine, or a Ray cluster.

An engine only decides where and when a task runs. Tasks are pure functions of files, so the engine
cannot affect their results.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from paceline.data.prepare.config import PrepareConfig
from paceline.data.prepare.job import Task

TaskT = TypeVar("TaskT", bound=Task)
Result = TypeVar("Result")

MOST_DEATHS = 3
"""Number of times that a task is retried after its worker died."""


class Engine(Protocol):
    """Runs tasks."""

    def run(
        self, function: Callable[[TaskT], Result], tasks: Sequence[TaskT]
    ) -> Iterator[tuple[int, Result]]:
        """Yields each task's number and result, in the order in which they finish."""


@contextlib.contextmanager
def open_engine(config: PrepareConfig) -> Iterator[Engine]:
    """Yields the configured engine and ends its workers afterwards."""
    if config.engine == "ray":
        from paceline.data.prepare.engines.ray import RayEngine

        with contextlib.closing(RayEngine(config.ray_address, config.workers)) as cluster:
            yield cluster
        return
    from paceline.data.prepare.engines.local import LocalEngine

    with contextlib.closing(LocalEngine(config.num_local_workers)) as pool:
        yield pool
