"""Tests that nested waits count once, and only in the main thread."""

import threading
import time

from paceline.parallel.ranks.pending import counted_wait, waited_s


def _wait() -> None:
    with counted_wait():
        time.sleep(0.02)


def test_a_wait_inside_of_another_is_counted_once() -> None:
    before, began = waited_s(), time.perf_counter()
    with counted_wait():
        _wait()
        _wait()
    assert 0.04 <= waited_s() - before <= time.perf_counter() - began


def test_other_threads_do_not_count() -> None:
    before = waited_s()
    thread = threading.Thread(target=_wait)
    thread.start()
    thread.join()
    assert waited_s() == before
