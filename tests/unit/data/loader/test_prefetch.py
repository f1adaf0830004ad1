"""Tests that the prefetching thread always ends with its owner, and passes errors on."""

import gc
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from paceline.data.loader.loader import Prefetcher


def num_threads() -> int:
    return sum(thread.name == "prefetch-batches" for thread in threading.enumerate())


def test_items_come_in_order_and_end() -> None:
    assert list(Prefetcher(iter(range(100)), 2)) == list(range(100))
    assert num_threads() == 0


def test_it_makes_no_more_than_its_depth_ahead() -> None:
    made = []

    def items() -> Iterator[int]:
        for number in itertools.count():
            made.append(number)
            yield number

    prefetcher = Prefetcher(items(), 3)
    for taken in range(1, 5):
        assert next(prefetcher) == taken - 1
        time.sleep(0.02)
        assert len(made) <= taken + 3
    prefetcher.close()


def test_close_ends_thread_and_iterator() -> None:
    closed = []

    def items() -> Iterator[int]:
        try:
            yield from itertools.count()
        finally:
            closed.append(True)

    prefetcher = Prefetcher(items(), 2)
    next(prefetcher)
    prefetcher.close()
    prefetcher.close()
    assert num_threads() == 0
    assert closed == [True]
    with pytest.raises(StopIteration):
        next(prefetcher)


def test_a_thread_does_not_outlive_its_owner() -> None:
    prefetcher = Prefetcher(itertools.count(), 2)
    next(prefetcher)
    del prefetcher
    gc.collect()
    assert num_threads() == 0


def test_an_error_comes_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("no second")

    prefetcher = Prefetcher(items(), 5)
    assert next(prefetcher) == 1
    with pytest.raises(ValueError, match="no second") as caught:
        next(prefetcher)
    assert "items" in [entry.name for entry in caught.traceback]
    assert num_threads() == 0


@pytest.mark.parametrize("end", ["pass", "raise SystemExit(0)", "next(p); gc.freeze()"])
def test_a_program_ends_while_the_thread_waits(end: str) -> None:
    program = (
        "import gc, itertools\n"
        "from paceline.data.loader.loader import Prefetcher\n"
        "p = Prefetcher(itertools.count(), 2)\n"
        f"next(p)\n{end}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stderr == ""
