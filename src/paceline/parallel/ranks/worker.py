"""A thread that runs tasks in order, and that no process waits for when it ends."""

import concurrent.futures
import queue
import threading
import weakref
from collections.abc import Callable
from typing import TypeAlias

_Task: TypeAlias = "tuple[Callable[[], None], concurrent.futures.Future[None]]"


class Worker:
    """Runs tasks one after the other in a thread of its own.

    A process that ends joins the threads of `concurrent.futures`: a rank that has failed would wait
    for messages from other ranks, which wait for it, before its launcher learns of the failure.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        threading.Thread(target=_run_all, args=(self._tasks,), name=name, daemon=True).start()
        weakref.finalize(self, self._tasks.put, None)

    def submit(self, task: Callable[[], None]) -> "concurrent.futures.Future[None]":
        """Appends a task; returns its future."""
        future: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._tasks.put((task, future))
        return future


def _run_all(tasks: "queue.SimpleQueue[_Task | None]") -> None:
    while (entry := tasks.get()) is not None:
        task, future = entry
        try:
            task()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        del entry, task, future  # While the thread waits for the next task, it holds nothing.
