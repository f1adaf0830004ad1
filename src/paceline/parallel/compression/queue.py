"""Compressed collectives in flight, one after another, beside the program.

On a CPU, one thread per container packs, sends, waits and unpacks beside forward and backward. On
an accelerator, all of it is queued in one stream, which waits for its messages; the host goes on.
The messages use a process group of their own, in the order in which the program starts them, which
is the same on every rank, whatever the program sends meanwhile.

A collective that reads values on the host, to decide what it does next, would stop the program. It
runs in a thread on every device, and on an accelerator in a stream that the thread waits for.
"""

import concurrent.futures
import functools
from collections.abc import Callable

import torch
import torch.distributed as dist

from paceline.devices import accelerator
from paceline.parallel.ranks.collectives import GroupReference
from paceline.parallel.ranks.worker import Worker


class CompressedQueue:
    """Runs the compressed collectives of one container in order; collective to create.

    Args:
        group: The ranks of the container.
        device: The device of its tensors.
        reads_values: Whether collectives read values on the host.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, *, reads_values: bool = False
    ) -> None:
        ranks = dist.get_process_group_ranks(group)
        # torch would give the new group its own default, half an hour.
        timeout = group._get_backend(device).options._timeout
        own = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
        assert own is not None
        self._group_reference = GroupReference(own)
        self._device = device
        self._stream = accelerator.new_stream(device)
        self._worker: Worker | None = None
        if self._stream is None or reads_values:
            self._worker = Worker("paceline-compression")

    def start(self, collective: Callable[[dist.ProcessGroup], None]) -> dist.Work:
        """Starts a collective; returns it in flight.

        Args:
            collective: Packs, sends, waits and unpacks, given the process group.
        """
        group = self._group_reference.get()
        if self._worker is not None:
            begin = accelerator.point_in_stream(self._device)
            run = functools.partial(self._run_in_thread, collective, group, begin)
            return _InThread(self._worker.submit(run))  # type: ignore[return-value]
        assert self._stream is not None
        program = accelerator.current_stream(self._device)
        assert program is not None
        with self._stream:
            accelerator.follow(self._device, program)
            _without_gradients(collective, group)
            return _InStream(self._device)  # type: ignore[return-value]

    def _run_in_thread(
        self,
        collective: Callable[[dist.ProcessGroup], None],
        group: dist.ProcessGroup,
        begin: torch.Event | None,
    ) -> None:
        if self._stream is None or begin is None:
            _without_gradients(collective, group)
            return
        accelerator.select(self._device)
        with self._stream:
            accelerator.wait_in_stream(self._device, begin)
            _without_gradients(collective, group)
            accelerator.synchronize_stream(self._device)


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
