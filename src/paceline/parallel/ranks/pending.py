"""Communication in flight, and waiting for its completion.

On a CPU, waiting blocks the program, so one wait serves all users of the message. On a GPU, waiting
only orders the current stream after the message: every stream that uses the memory must wait
separately.

No message may outlive its process group. A gloo message in flight when the group is destroyed keeps
the group's threads alive until the interpreter exits, which sometimes aborts the process. This
module therefore tracks all messages in flight, and `drain` waits for them: before a session leaves
its group, and at the exit of a program that created its group itself. After an error there is no
such wait: the other ranks may be gone.

Time that this process has waited for messages; the rest of a step is its own work.

On a GPU the host does not wait, so nothing is counted.
"""

import atexit
import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence

import torch
import torch.distributed as dist

from paceline.core.errors import PacelineError
from paceline.core.units import format_decimal
from paceline.devices import accelerator


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


class CollectiveError(PacelineError):
    """A collective failed or timed out; the message names rank, operation and size."""


def collective_error(operation: str, num_bytes: int, error: RuntimeError) -> CollectiveError:
    """Returns an error that names the rank, the operation and its size."""
    rank = dist.get_rank() if dist.is_initialized() else "?"
    cause = str(error).partition("\n")[0]
    size = format_decimal(num_bytes, "B")
    explanations = (explain() for reference in _explain if (explain := reference()) is not None)
    known = "".join(f"; {explanation}" for explanation in explanations if explanation)
    return CollectiveError(f"rank {rank}: {operation} of {size} failed: {cause}{known}")


def explain_failures(explain: Callable[[], str | None]) -> None:
    """Registers a method that may explain the cause of a failed collective.

    It returns an explanation or None; its object is not kept alive.
    """
    _explain[:] = [reference for reference in _explain if reference() is not None]
    _explain.append(weakref.WeakMethod(explain))


_explain: list[weakref.WeakMethod[Callable[[], str | None]]] = []


class Pending:
    """An operation in flight.

    Direct operations are point-to-point messages, which report completion only to a wait.
    """

    def __init__(
        self,
        operation: str,
        num_bytes: int,
        works: Sequence[dist.Work | None],
        device: torch.device,
        *,
        direct: bool = False,
    ) -> None:
        self._operation = operation
        self._num_bytes = num_bytes
        self._works = [work for work in works if work is not None]
        self._device = device
        self._is_direct = direct
        self._lock = threading.Lock()
        self._failure: CollectiveError | None = None
        self._ordered: set[Hashable] = set()
        """GPU streams that have already waited for the messages."""
        self._is_over = not self._works
        """Whether no further wait is necessary."""
        self._watcher: threading.Thread | None = None
        if self._works and accelerator.current_stream(device) is None:
            _in_flight[self] = None

    def is_completed(self) -> bool:
        """Returns whether the operation has completed; use for measurements, not for decisions.

        Completion of direct messages is known only after a wait. The first call starts a thread
        that waits for them.
        """
        if not self._is_direct:
            return all(work.is_completed() for work in self._works)
        if self._is_over:
            return True  # Known from a wait; a thread would take a moment to find the same.
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._wait_once, daemon=True)
            self._watcher.start()
        return not self._watcher.is_alive()

    def when_over(self, tell: Callable[[], None]) -> None:
        """Calls a function from a thread when direct messages complete; for measurements."""
        if self._is_direct:

            def wait_and_tell() -> None:
                self._wait_once()
                tell()

            threading.Thread(target=wait_and_tell, daemon=True).start()

    @property
    def is_awaited(self) -> bool:
        """Whether the program, or the current GPU stream, has already waited without an error."""
        if self._failure is not None:
            return False
        return self._is_over or accelerator.current_stream(self._device) in self._ordered

    def wait(self) -> None:
        """Waits for completion, on a GPU in the current stream; raises `CollectiveError`."""
        if not self._is_over:
            with counted_wait():
                self._wait_once()
        if self._failure is not None:
            raise self._failure

    def _wait_once(self) -> None:
        with self._lock:
            if self._is_over:
                return
            try:
                stream = accelerator.current_stream(self._device)
                if stream not in self._ordered:
                    for work in self._works:
                        work.wait()
                    self._ordered.add(stream)
                if stream is None:
                    self._end()
            except RuntimeError as error:
                self._failure = collective_error(self._operation, self._num_bytes, error)
                self._failure.__cause__ = error
                self._end()

    def _end(self) -> None:
        self._works = []  # They would keep the group alive.
        self._is_over = True
        _in_flight.pop(self, None)


_in_flight: dict[Pending, None] = {}
"""CPU operations that have not been waited for, in the order of their start."""


def drain(device: torch.device) -> None:
    """Waits for all operations in flight, at most for the group's timeout.

    Raises nothing: no caller uses the messages any more.
    """
    for pending in list(_in_flight):
        pending._wait_once()
    accelerator.synchronize(device)


def abandon() -> None:
    """Disables the wait for operations in flight at program exit; call after an error."""
    atexit.unregister(_drain_at_exit)


@atexit.register
def _drain_at_exit() -> None:
    if not hasattr(sys, "last_value"):
        drain(torch.device("cpu"))
