"""The batches of one rank in order, resumable at any position and world size.

The state is the position in the stream, counted in samples of all ranks, and the identity of the
stream. It does not depend on ranks, batch size or prefetched batches, and takes a few hundred bytes
for a dataset of any size.

A thread prefetches the next few batches while the current one is used. An error in the thread is
raised to the consumer in place of the failed batch, with the thread's traceback. The thread ends
with `close`, with the last reference to its owner, or with the interpreter, whichever is first: it
never keeps a program alive.
"""

import contextlib
import itertools
import queue
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np

from paceline.core.errors import DataError
from paceline.data.loader.batches import Allocate, Batch, BatchReader
from paceline.data.loader.config import LoaderConfig
from paceline.data.sampling import IndexArray, rank_range

_Item = TypeVar("_Item")


class _Failure(NamedTuple):
    error: BaseException
    """StopIteration as well, which ends the consumer's loop."""


class Prefetcher(Generic[_Item]):
    """Reads items from an iterator in a thread, a bounded number ahead.

    The thread takes over the iterator, and closes it at the end if it has `close`.
    """

    def __init__(self, items: Iterator[_Item], depth: int) -> None:
        ready: queue.SimpleQueue[_Item | _Failure] = queue.SimpleQueue()
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
        return made

    def close(self) -> None:
        """Ends the thread and waits for it."""
        self._is_over = True
        self._finalizer()


def _make_items(
    items: Iterator[_Item],
    ready: "queue.SimpleQueue[_Item | _Failure]",
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
            except BaseException as error:
                ready.put(_Failure(error))
                return


def _end(thread: threading.Thread, room: threading.Semaphore, stop: threading.Event) -> None:
    stop.set()
    room.release()
    if thread is not threading.current_thread():
        thread.join()


_SCHEMA = 1
_SAMPLES_LOCATED_AT_ONCE = 4096
"""Locating thousands of samples takes as long as locating a few. Shards are fetched this far
ahead."""


class TokenLoader:
    """An endless iterator over the batches of one rank.

    Args:
        config: The datasets, their order and the batch.
        rank: Rank of this process among those that share each batch.
        world_size: Number of ranks.
        allocate: Allocates the token arrays; NumPy's by default.
        every: Yields only every n-th batch, for workers that alternate.
    """

    def __init__(
        self,
        config: LoaderConfig,
        *,
        rank: int = 0,
        world_size: int = 1,
        allocate: Allocate | None = None,
        every: int = 1,
    ) -> None:
        rank_range(0, config.batch_size, rank, world_size)  # Raises if the arguments are invalid.
        self.config = config
        self._rank, self._world_size = rank, world_size
        self._every = every
        self.reader = BatchReader(config, allocate=allocate)
        self._consumed_samples = 0
        self._step = 0
        self._batches: Prefetcher[Batch] | Iterator[Batch] | None = None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._batches is None:
            batches = _read_batches(
                self.reader,
                range(*rank_range(0, self.config.batch_size, self._rank, self._world_size)),
                first_sample=self._consumed_samples,
                step=self._step,
                every=self._every,
            )
            depth = self.config.prefetch
            self._batches = Prefetcher(batches, depth) if depth else batches
        try:
            batch = next(self._batches)
        except BaseException:
            self._end_batches()  # The next call retries the batch: the failure may be transient.
            raise
        self._step = batch.step + self._every
        self._consumed_samples += self._every * self.config.batch_size
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the stream after the batches returned so far."""
        return {
            "schema": _SCHEMA,
            "consumed_samples": self._consumed_samples,
            "step": self._step,
            **self.reader.identity,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from the `state` of a loader of any world size and batch size."""
        self._end_batches()
        if state.get("schema") != _SCHEMA:
            raise DataError(
                f"the loader's state has schema {state.get('schema')}, but this version of "
                f"Paceline reads {_SCHEMA}"
            )
        for name, own in self.reader.identity.items():
            if state.get(name) != own:
                raise DataError(
                    f"cannot resume: {name} was {state.get(name)!r} and is {own!r} now, which "
                    "changes the order of samples; set it back or start a new run"
                )
        self._consumed_samples = state["consumed_samples"]
        self._step = state["step"]

    def skip(self, num_batches: int) -> None:
        """Skips the next `num_batches` batches without reading them."""
        self._end_batches()
        self._consumed_samples += num_batches * self.config.batch_size
        self._step += num_batches

    def close(self) -> None:
        """Ends the prefetch thread and releases all files."""
        self._end_batches()
        self.reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end_batches(self) -> None:
        if isinstance(self._batches, Prefetcher):
            self._batches.close()
        self._batches = None


def _read_batches(
    reader: BatchReader, own: range, *, first_sample: int, step: int, every: int
) -> Iterator[Batch]:
    """Yields a rank's batches; `own` are its positions within a step."""
    # Not a method, because the thread that runs it must not keep the loader alive.
    num_steps = max(1, _SAMPLES_LOCATED_AT_ONCE // len(own))
    stride = every * reader.config.batch_size
    offsets = np.arange(num_steps)[:, None] * stride + np.arange(own.start, own.stop)

    def locate(number: int) -> tuple[IndexArray, tuple[IndexArray, IndexArray]]:
        positions = (offsets + (first_sample + number * num_steps * stride)).ravel()
        located = reader.locate(positions)
        reader.fetch_ahead(*located)
        return positions, located

    following = locate(0)
    for number in itertools.count(1):
        positions, (sources, samples) = following
        following = locate(number)
        for begin in range(0, len(positions), len(own)):
            part = slice(begin, begin + len(own))
            yield reader.read(positions[part], (sources[part], samples[part]), step=step)
            step += every
