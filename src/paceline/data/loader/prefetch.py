"""A thread that prefetches the next few items while the current one is used.

An error in the thread is raised to the consumer in place of the failed item, with the thread's
traceback. The thread ends with `close`, with the last reference to its owner, or with the
interpreter, whichever is first: it never keeps a program alive.
"""

import contextlib
import queue
import threading
import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


class _Failure:
    def __init__(self, error: BaseException) -> None:
        self.error = error


class _End:
    pass


class Prefetcher(Generic[_Item]):
    """Reads items from an iterator in a thread, a bounded number ahead.

    Args:
        items: The iterator, which the thread takes over, and closes at the end if it has `close`.
        depth: Number of items to prefetch.
    """

    def __init__(self, items: Iterator[_Item], depth: int) -> None:
        ready: queue.SimpleQueue[_Item | _Failure | _End] = queue.SimpleQueue()
        room = threading.Semaphore(depth)
        stop = threading.Event()
        # The thread has no reference to `self`; otherwise the owner could never be collected.
        thread = threading.Thread(
            target=_make_items,
            args=(items, ready, room, stop),
            name="prefetch-batches",
            daemon=True,
        )
        self._ready, self._room = ready, room
        self._is_over = False
        self._finalizer = weakref.finalize(self, _end, thread, room, stop)
        thread.start()

    def __iter__(self) -> Iterator[_Item]:
        return self

    def __next__(self) -> _Item:
        if self._is_over:
            raise StopIteration
        made = self._ready.get()
        self._room.release()
        if isinstance(made, _Failure):
            self.close()
            raise made.error
        if isinstance(made, _End):
            self.close()
            raise StopIteration
        return made

    def close(self) -> None:
        """Ends the thread and waits for it."""
        self._is_over = True
        self._finalizer()


def _make_items(
    items: Iterator[_Item],
    ready: "queue.SimpleQueue[_Item | _Failure | _End]",
    room: threading.Semaphore,
    stop: threading.Event,
) -> None:
    with contextlib.ExitStack() as stack:
        if hasattr(items, "close"):
            stack.callback(items.close)
        while True:
            room.acquire()
            if stop.is_set():
                return
            try:
                ready.put(next(items))
            except StopIteration:
                ready.put(_End())
                return
            except BaseException as error:
                ready.put(_Failure(error))
                return


def _end(thread: threading.Thread, room: threading.Semaphore, stop: threading.Event) -> None:
    stop.set()
    room.release()
    if thread is not threading.current_thread():
        thread.join()
