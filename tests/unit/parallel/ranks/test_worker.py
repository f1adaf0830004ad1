"""Tests of the thread that no process waits for."""

import gc
import subprocess
import sys
import threading
import time

import pytest

from paceline.parallel.ranks.worker import Worker


def test_tasks_run_in_order_in_one_thread() -> None:
    worker = Worker("of a test")
    seen: list[tuple[int, str]] = []
    futures = [
        worker.submit(lambda n=number: seen.append((n, threading.current_thread().name)))  # type: ignore[misc]
        for number in range(5)
    ]
    for future in futures:
        future.result(timeout=10)
    assert seen == [(number, "of a test") for number in range(5)]


def test_an_error_is_that_of_its_task() -> None:
    worker = Worker("of a test")
    with pytest.raises(ZeroDivisionError):
        worker.submit(lambda: 1 / 0).result(timeout=10)  # type: ignore[arg-type, return-value]
    assert worker.submit(lambda: None).result(timeout=10) is None


def test_the_thread_ends_with_its_owner() -> None:
    worker = Worker("ends with its owner")
    worker.submit(lambda: None).result(timeout=10)
    del worker
    gc.collect()
    deadline = time.monotonic() + 10
    while any(thread.name == "ends with its owner" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_ends_while_a_task_runs() -> None:
    code = (
        "import time\n"
        "from paceline.parallel.ranks.worker import Worker\n"
        "Worker('busy').submit(lambda: time.sleep(600))\n"
        "time.sleep(0.1)\n"
        "raise SystemExit(3)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 3
