"""Compressed collectives in flight, one after another, beside the program.

On a CPU, one thread per container packs, sends, waits and unpacks beside forward and backward. On
an accelerator, all of it is queued in one stream, which waits for its messages; the host goes on.
The messages use a process group of their own, in the order in which the program starts them, which
is the same on every rank, whatever the program sends meanwhile.
"""

import concurrent.futures
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist

from paceline.devices import accelerator
from paceline.parallel.ranks.collectives import GroupReference


class CompressedQueue:
    """Runs the compressed collectives of one container in order; collective to create.

    Args:
        group: The ranks of the container.
        device: The device of its tensors.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        ranks = dist.get_process_group_ranks(group)
        own = dist.new_group(ranks, use_local_synchronization=True)
        assert own is not None
        self._group_reference = GroupReference(own)
        self._device = device
        self._stream = accelerator.new_stream(device)
        self._threads: concurrent.futures.ThreadPoolExecutor | None = None
        if self._stream is None:
            self._threads = concurrent.futures.ThreadPoolExecutor(1, "paceline-compression")
            weakref.finalize(self, self._threads.shutdown, wait=False)

    def start(self, collective: Callable[[dist.ProcessGroup], None]) -> dist.Work:
        """Starts a collective; returns it in flight.

        Args:
            collective: Packs, sends, waits and unpacks, given the process group.
        """
        group = self._group_reference.get()
        if self._threads is not None:
            future = self._threads.submit(_without_gradients, collective, group)
            return _InThread(future)  # type: ignore[return-value]
        assert self._stream is not None
        program = accelerator.current_stream(self._device)
        assert program is not None
        with self._stream:
            accelerator.follow(self._device, program)
            _without_gradients(collective, group)
            return _InStream(self._device)  # type: ignore[return-value]


def _without_gradients(
    collective: Callable[[dist.ProcessGroup], None], group: dist.ProcessGroup
) -> None:
    with torch.no_grad():
        collective(group)


class _InThread:
    """A collective that a thread runs, with the interface of torch's works."""

    def __init__(self, future: "concurrent.futures.Future[None]") -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()

    def is_completed(self) -> bool:
        return self._future.done()


class _InStream:
    """A collective that is queued in a stream, up to the stream's current point."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._end = accelerator.point_in_stream(device)

    def wait(self) -> None:
        assert self._end is not None
        accelerator.wait_in_stream(self._device, self._end)

    def is_completed(self) -> bool:
        assert self._end is not None
        return bool(self._end.query())
