"""An average of gradients whose messages are packed in 8 or 4 bits.

Each rank owns one piece of a bucket, a whole number of blocks. An average takes two messages:

1. Out: a reduce-scatter in 8 or 4 bits leaves each owner the float32 sum of its piece.
2. Back: an all-gather gives the owners' sums to all ranks in 8 bits. Everybody, the owner included,
   uses the unpacked sums, so that all ranks end with the same bits.

Flags travel with the first message: every rank learns which parameters had a gradient anywhere.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.parallel.compression.codec import BLOCK, CodeName
from paceline.parallel.compression.packed import PackedAllGather, PackedReduceScatter


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
        length = -(-num_elements // (BLOCK * num_ranks)) * BLOCK
        pieces = [
            slice(min(owner * length, num_elements), min((owner + 1) * length, num_elements))
            for owner in range(num_ranks)
        ]
        self._out = PackedReduceScatter(pieces, num_flags, outward, rank=rank, device=device)
        self._back = PackedAllGather(pieces, rank=rank, device=device)
        self.own = pieces[rank]
        """The piece that this rank sums."""
        self.left_back = torch.zeros(self.own.stop - self.own.start, device=device)
        """What this rank's messages have left out of the sums of its piece."""

    @property
    def left_out(self) -> Tensor:
        """What this rank's messages have left out of its numbers."""
        return self._out.left_out

    def all_left_out(self) -> Tensor:
        """Returns what is to be added to this rank's numbers if another average goes on.

        What the rank's sums have left out counts as its own.
        """
        total = self.left_out.clone()
        total[self.own] += self.left_back
        return total

    @property
    def message_bytes(self) -> int:
        """Mean size of the two messages, as of the one message of an all-reduce."""
        return (self._out.message_bytes + self._back.message_bytes) // 2

    def run(self, numbers: Tensor, flags: Tensor, group: dist.ProcessGroup) -> None:
        """Replaces float32 numbers with their sum over the ranks, and flags with their maximum."""
        self._out.run(numbers, flags, group)
        self._back.run(numbers[self.own], self.left_back, numbers, group, adds=False)
