"""Background threads that fetch files before they are needed, and keep no object alive.

Errors are ignored: the same fetch fails again where the file is needed and is reported there. The
threads end with `close`, with the last reference to their owner, or with the interpreter, which
waits for the fetch that each thread has in flight.
"""

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Iterable


class FetchAhead:
    """Calls a method for each requested name, in threads.

    Args:
        fetch: A bound method; its object is not kept alive.
        num_threads: Number of concurrent calls.
    """

    def __init__(self, fetch: Callable[[str], None], num_threads: int) -> None:
        names: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        asked: set[str] = set()
        stop = threading.Event()
        threads = [
            threading.Thread(
                target=_call_for_names,
                args=(weakref.WeakMethod(fetch), names, asked, stop),
                name="fetch-ahead",
                daemon=True,
            )
            for _ in range(num_threads)
        ]
        self._names, self._asked = names, asked
        self._finalizer = weakref.finalize(self, _end, threads, names, stop)
        for thread in threads:
            thread.start()

    def ask(self, names: Iterable[str]) -> None:
        """Queues a call for each name, unless one is already queued or in flight."""
        for name in names:
            if name not in self._asked:
                self._asked.add(name)
                self._names.put(name)

    def close(self) -> None:
        """Starts no more calls, and waits for those in flight."""
        self._finalizer()


def _call_for_names(
    fetch: "weakref.WeakMethod[Callable[[str], None]]",
    names: "queue.SimpleQueue[str | None]",
    asked: set[str],
    stop: threading.Event,
) -> None:
    while (name := names.get()) is not None and not stop.is_set():
        method = fetch()
        if method is None:
            return
        with contextlib.suppress(Exception):
            method(name)
        del method  # Otherwise the wait for the next name would keep its object alive.
        asked.discard(name)


def _end(
    threads: list[threading.Thread], names: "queue.SimpleQueue[str | None]", stop: threading.Event
) -> None:
    stop.set()
    for _ in threads:
        names.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()
