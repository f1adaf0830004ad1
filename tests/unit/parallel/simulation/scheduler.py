"""Runs ranks as threads, exactly one at a time, in an order that a seed decides.

A rank runs until it launches a message or waits for one. Then the seed decides what happens next:
another rank continues, or a message that all ranks have launched is delivered. The same seed
reproduces the same order.
"""

import queue
import random
import threading
from collections.abc import Callable
from typing import Any, Protocol


class ViolationError(AssertionError):
    """A program did something that is invalid on a real device."""


class _StoppedError(BaseException):
    """Stops a rank when another has failed; ``except Exception`` does not catch it."""


class Network(Protocol):
    """Messages between ranks."""

    def deliverable(self) -> list[Callable[[], None]]:
        """Returns the deliveries that are possible now."""

    def pending(self) -> str:
        """Describes the messages in flight."""


class Scheduler:
    """Runs one program on every rank, one rank at a time.

    Args:
        num_ranks: Number of threads, which run until `close`.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.network: Network
        self._random = random.Random(0)
        self._haste = self._patience = 0.5
        self._running: set[int] = set()
        self._waits: dict[int, Callable[[], bool]] = {}
        self._results: list[Any] = []
        self._error: BaseException | None = None
        self._batons = [_taken_lock() for _ in range(num_ranks)]
        self._is_over = _taken_lock()
        self._programs: list[queue.SimpleQueue[Callable[[int], Any] | None]] = [
            queue.SimpleQueue() for _ in range(num_ranks)
        ]
        self._threads = [
            threading.Thread(target=self._serve, args=(rank,), daemon=True)
            for rank in range(num_ranks)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, program: Callable[[int], Any], seed: int) -> list[Any]:
        """Runs a program on all ranks in the order of a seed; returns the result of each rank."""
        self._random = random.Random(seed)
        # Probability of delivery before a rank runs: messages are late, mixed or early.
        self._haste = self._random.choice((0.02, 0.3, 0.9))
        # Probability of no switch: ranks run for long, so that others fall behind, or take turns.
        self._patience = self._random.choice((0.95, 0.7, 0.3))
        self._running = set(range(self.num_ranks))
        self._waits.clear()
        self._results = [None] * self.num_ranks
        self._error = None
        for programs in self._programs:
            programs.put(program)
        self._batons[self._random.randrange(self.num_ranks)].release()
        self._is_over.acquire()
        if self._error is not None:
            raise self._error
        return self._results

    def close(self) -> None:
        """Stops the threads."""
        for programs in self._programs:
            programs.put(None)
        for thread in self._threads:
            thread.join()

    def switch(self, rank: int) -> None:
        """Lets the seed decide whether another rank runs first."""
        if self._error is not None or self._random.random() > self._patience:
            self._pass_on(rank)

    def wait(self, rank: int, is_over: Callable[[], bool]) -> None:
        """Blocks a rank until `is_over()` is true."""
        if not is_over():
            self._waits[rank] = is_over
            self._pass_on(rank)

    def _serve(self, rank: int) -> None:
        while (program := self._programs[rank].get()) is not None:
            self._batons[rank].acquire()
            try:
                if self._error is None:
                    self._results[rank] = program(rank)
            except _StoppedError:
                pass
            except BaseException as error:
                self._fail(error)
            self._running.discard(rank)
            if not self._running:
                self._is_over.release()
                continue
            try:
                following = self._choose()
            except BaseException as error:
                self._fail(error)
                following = min(self._running)
            self._batons[following].release()

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error

    def _pass_on(self, rank: int) -> None:
        if self._error is None:
            following = self._choose()
            if following != rank:
                self._batons[following].release()
                self._batons[rank].acquire()
        if self._error is not None:
            raise _StoppedError

    def _choose(self) -> int:
        """Delivers messages until the seed chooses a rank; returns that rank."""
        while True:
            if self._error is not None:
                return min(self._running)
            ready = [
                rank
                for rank in sorted(self._running)
                if rank not in self._waits or self._waits[rank]()
            ]
            arrivals = self.network.deliverable()
            if not (ready or arrivals):
                raise ViolationError(
                    f"ranks {sorted(self._running)} wait for each other; {self.network.pending()}"
                )
            if arrivals and (not ready or self._random.random() < self._haste):
                self._random.choice(arrivals)()
                continue
            rank = self._random.choice(ready)
            self._waits.pop(rank, None)
            return rank


def _taken_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock
