"""Time that this process has waited for messages; the rest of a step is its own work.

On a GPU the host does not wait, so nothing is counted.
"""

import contextlib
import threading
import time
from collections.abc import Iterator


class _Waited:
    seconds = 0.0
    is_counting = False


@contextlib.contextmanager
def counted_wait() -> Iterator[None]:
    """Counts the time spent inside the context as waiting.

    Counts only in the main thread, because waits of other threads overlap with work. Nested waits
    are counted once.
    """
    if _Waited.is_counting or threading.current_thread() is not threading.main_thread():
        yield
        return
    began = time.perf_counter()
    _Waited.is_counting = True
    try:
        yield
    finally:
        _Waited.is_counting = False
        _Waited.seconds += time.perf_counter() - began


def waited_s() -> float:
    """Returns the seconds that the main thread has waited for messages since program start."""
    return _Waited.seconds
