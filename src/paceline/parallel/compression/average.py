"""An average of gradients whose messages are packed in 8 or 4 bits.

Each rank owns one piece of a bucket, a whole number of blocks. An average takes two messages:

1. Out: every rank packs its numbers with what earlier steps have left out of them, and sends each
   owner its row (all-to-all). The owner unpacks the rows of all ranks and adds them in float32, in
   the order of the ranks.
2. Back: the owner packs the sum with what earlier steps have left out of sums, in 8 bits, and all
   ranks gather the rows of all owners (all-gather). Everybody, the owner included, uses the
   unpacked sum, so that all ranks end with the same bits.

Flags, one byte per parameter, travel unpacked behind the rows out, and every rank gets those of all
ranks: it learns which parameters had a gradient anywhere.

On a CPU, one thread per container runs the averages one after another beside backward. On an
accelerator, they are queued in one stream, which waits for their messages, and the host goes on.
Messages of averages use a process group of their own, whose order of messages is that of the
buckets on every rank, whatever the program sends meanwhile.
"""

import concurrent.futures
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.devices import accelerator
from paceline.parallel.compression.codec import BLOCK, Codec, CodeName
from paceline.parallel.ranks.collectives import GroupReference, start_all_gather, start_all_to_all
from paceline.parallel.ranks.pending import Pending

_ROW_ALIGNMENT = 16
"""Rows begin at multiples of this many bytes."""


class AverageQueue:
    """Runs the averages of one container in order, beside the program; collective to create.

    Args:
        group: The ranks that average.
        device: The device of the gradients.
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
            self._threads = concurrent.futures.ThreadPoolExecutor(1, "paceline-average")
            weakref.finalize(self, self._threads.shutdown, wait=False)

    def start(self, average: Callable[[dist.ProcessGroup], None], num_bytes: int) -> Pending:
        """Starts an average; returns it in flight.

        Args:
            average: Sends, waits and computes, given the process group.
            num_bytes: Size of its messages.
        """
        group = self._group_reference.get()
        work: _InThread | _InStream
        if self._threads is not None:
            work = _InThread(self._threads.submit(_without_gradients, average, group))
        else:
            assert self._stream is not None
            program = accelerator.current_stream(self._device)
            assert program is not None
            with self._stream:
                accelerator.follow(self._device, program)
                _without_gradients(average, group)
                work = _InStream(self._device)
        return Pending("compressed average", num_bytes, [work], self._device, direct=True)  # type: ignore[list-item]


def _without_gradients(
    average: Callable[[dist.ProcessGroup], None], group: dist.ProcessGroup
) -> None:
    with torch.no_grad():
        average(group)


class _InThread:
    """An average that a thread runs, with the interface of torch's works."""

    def __init__(self, future: "concurrent.futures.Future[None]") -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()

    def is_completed(self) -> bool:
        return self._future.done()


class _InStream:
    """An average that is queued in a stream, up to the stream's current point."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._end = accelerator.point_in_stream(device)

    def wait(self) -> None:
        assert self._end is not None
        accelerator.wait_in_stream(self._device, self._end)

    def is_completed(self) -> bool:
        assert self._end is not None
        return bool(self._end.query())


class CompressedAverage:
    """The average of one bucket, and what its messages have left out so far.

    Args:
        num_elements: Numbers of the bucket.
        num_flags: Flags that travel with it.
        outward: How the ranks' numbers are packed.
        num_ranks: Number of ranks that average.
        rank: This rank's number among them.
        device: The device of the numbers.
    """

    def __init__(
        self,
        num_elements: int,
        num_flags: int,
        outward: CodeName,
        *,
        num_ranks: int,
        rank: int,
        device: torch.device,
    ) -> None:
        self._outward, self._back = Codec(outward), Codec("int8")
        self._num_blocks = -(-num_elements // (BLOCK * num_ranks))
        """Blocks of a piece."""
        length = self._num_blocks * BLOCK
        self._pieces = [
            slice(min(owner * length, num_elements), min((owner + 1) * length, num_elements))
            for owner in range(num_ranks)
        ]
        self._own = self._pieces[rank]
        self._num_flags = num_flags
        self._device = device
        self._rank = rank
        self.left_out = torch.zeros(num_elements, device=device)
        """What this rank's messages have left out of its numbers."""
        self.left_back = torch.zeros(self._own.stop - self._own.start, device=device)
        """What this rank's messages have left out of the sums of its piece."""
        outward_bytes = self._outward.row_bytes(self._num_blocks) + num_flags
        self._outward_bytes = -(-outward_bytes // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
        self._back_bytes = self._back.row_bytes(self._num_blocks)

    def all_left_out(self) -> Tensor:
        """Returns what is to be added to this rank's numbers if another average goes on.

        What the rank's sums have left out counts as its own.
        """
        total = self.left_out.clone()
        total[self._own] += self.left_back
        return total

    @property
    def message_bytes(self) -> int:
        """Mean size of the two messages, as of the one message of an all-reduce."""
        return len(self._pieces) * (self._outward_bytes + self._back_bytes) // 2

    def run(self, numbers: Tensor, flags: Tensor, group: dist.ProcessGroup) -> None:
        """Replaces float32 numbers with their sum over the ranks, and flags with their maximum."""
        num_ranks = len(self._pieces)
        packed_bytes = self._outward.row_bytes(self._num_blocks)
        rows = torch.empty(num_ranks, self._outward_bytes, dtype=torch.uint8, device=self._device)
        own_flags = flags.to(torch.uint8)
        for piece, row in zip(self._pieces, rows.unbind(), strict=True):
            self._outward.pack(numbers[piece], self.left_out[piece], row[:packed_bytes])
            row[packed_bytes : packed_bytes + self._num_flags] = own_flags
        received, arriving = start_all_to_all(rows, group)
        arriving.wait()
        own = numbers[self._own]
        for source, row in enumerate(received.unbind()):
            self._outward.unpack(row[:packed_bytes], own, adds=source > 0)
        all_flags = received[:, packed_bytes : packed_bytes + self._num_flags]
        flags.copy_(all_flags.amax(0))
        sums = torch.empty(num_ranks, self._back_bytes, dtype=torch.uint8, device=self._device)
        self._back.pack(own, self.left_back, sums[self._rank])
        borders = range(0, sums.numel() + 1, self._back_bytes)
        start_all_gather(sums.view(-1), borders, group).wait()
        for piece, row in zip(self._pieces, sums.unbind(), strict=True):
            self._back.unpack(row, numbers[piece], adds=False)
