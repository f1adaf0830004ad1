"""How long this process has waited for messages: what is left of a step is its own work.

On a GPU the host does not wait, so that nothing is counted there.
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
    """Counts the time until it is closed, in the main thread: others wait beside the work.

    Inside of another wait nothing is counted twice.
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
    """Returns the seconds that the main thread has waited for messages since it began."""
    return _Waited.seconds
