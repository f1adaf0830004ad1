"""Tasks for tests of engines, in a module that workers can import."""

import os
import pathlib
import signal
from typing import NamedTuple

from paceline.core.errors import DataError


class Task(NamedTuple):
    number: int
    folder: str = ""
    num_deaths: int = 0

    @property
    def label(self) -> str:
        return f"task {self.number}"


def square(task: Task) -> tuple[int, int]:
    return task.number**2, os.getpid()


def refuse(task: Task) -> None:
    raise DataError(f"{task.label}: refused")


def divide(task: Task) -> float:
    return 1 / task.number


def die_at_first(task: Task) -> int:
    """Kills its own process in the first `num_deaths` attempts of a task."""
    deaths = pathlib.Path(task.folder, f"{task.number}.deaths")
    num_before = len(deaths.read_bytes()) if deaths.exists() else 0
    if num_before < task.num_deaths:
        deaths.write_bytes(b"x" * (num_before + 1))
        os.kill(os.getpid(), signal.SIGKILL)
    return task.number
