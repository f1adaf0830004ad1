"""Communication that was started, and its end.

On a CPU waiting blocks the program, so that whoever waits first has waited for all. On a GPU
waiting only orders the current stream behind the message: every stream that goes on to use the
memory has to wait by itself, however many have done so before.

Nothing may outlive its process group. A message of gloo that is in flight when the group goes keeps
the group's threads alive until the interpreter ends, which aborts the process now and then. So
what is in flight is known here, and `drain` waits for it: before a session leaves its group, and
when a program ends that has made its group by itself. After an error nobody waits: the other ranks
may be gone.
"""

import atexit
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence

import torch
import torch.distributed as dist

from paceline.core.errors import PacelineError
from paceline.core.units import format_decimal
from paceline.parallel.ranks import device_clock
from paceline.parallel.ranks.waiting import counted_wait


class CollectiveError(PacelineError):
    """A collective failed or timed out, naming rank, operation and size."""


def collective_error(operation: str, num_bytes: int, error: RuntimeError) -> CollectiveError:
    """Returns an error that names the rank, the operation and its size."""
    rank = dist.get_rank() if dist.is_initialized() else "?"
    cause = str(error).partition("\n")[0]
    size = format_decimal(num_bytes, "B")
    explanations = (explain() for reference in _explain if (explain := reference()) is not None)
    known = "".join(f"; {explanation}" for explanation in explanations if explanation)
    return CollectiveError(f"rank {rank}: {operation} of {size} failed: {cause}{known}")


def explain_failures(explain: Callable[[], str | None]) -> None:
    """Has a method asked what it knows of the cause when a collective has failed.

    Args:
        explain: Its object is not kept alive.
    """
    _explain[:] = [reference for reference in _explain if reference() is not None]
    _explain.append(weakref.WeakMethod(explain))


_explain: list[weakref.WeakMethod[Callable[[], str | None]]] = []


class Pending:
    """Communication that was started.

    Args:
        operation: What it is, for messages.
        num_bytes: Its size, for messages.
        works: What to wait for.
        device: Where the memory is.
        direct: Whether these are messages from rank to rank, which end unseen unless waited for.
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
        """Streams of a GPU that are behind the messages already."""
        self._is_over = not self._works
        """Whether nobody has to wait any more."""
        self._watcher: threading.Thread | None = None
        if self._works and device_clock.current_stream(device) is None:
            _in_flight[self] = None

    def is_completed(self) -> bool:
        """Whether waiting would take no time; asking is for measurements, not for decisions.

        Direct messages are over when someone has waited for them: from the first question on, a
        thread does.
        """
        if not self._is_direct:
            return all(work.is_completed() for work in self._works)
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._wait_once, daemon=True)
            self._watcher.start()
        return not self._watcher.is_alive()

    def when_over(self, tell: Callable[[], None]) -> None:
        """Calls somebody at the end of direct messages, from a thread; for measurements."""
        if self._is_direct:

            def wait_and_tell() -> None:
                self._wait_once()
                tell()

            threading.Thread(target=wait_and_tell, daemon=True).start()

    @property
    def is_awaited(self) -> bool:
        """Whether the program, or the current stream of a GPU, has waited for the end already."""
        if self._failure is not None:
            return False
        return self._is_over or device_clock.current_stream(self._device) in self._ordered

    def wait(self) -> None:
        """Waits for the end, on a GPU in the current stream; an error names the operation."""
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
                stream = device_clock.current_stream(self._device)
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
"""Messages that nobody has waited for yet, in the order in which they were started."""


def drain(device: torch.device) -> None:
    """Waits for all that is in flight, whoever has started it, for the group's timeout at most.

    Messages that fail now are of no use to anyone, so that nothing is raised.

    Args:
        device: What this rank computes on.
    """
    for pending in list(_in_flight):
        pending._wait_once()
    device_clock.synchronize(device)


def abandon() -> None:
    """Lets the program end without waiting for what is in flight, as after an error."""
    atexit.unregister(_drain_at_exit)


@atexit.register
def _drain_at_exit() -> None:
    if not hasattr(sys, "last_value"):
        drain(torch.device("cpu"))
