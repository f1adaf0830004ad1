"""Reduce-scatter and all-gather whose messages are packed in 8 or 4 bits.

The numbers of a bucket are cut into pieces, one per rank. In a row, a piece is padded to whole
blocks. What packing leaves out of a message is kept by its sender and added to its next message
(error feedback).
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.parallel.compression.codec import BLOCK, Codec, CodeName
from paceline.parallel.ranks.collectives import start_all_gather, start_all_to_all

_ROW_ALIGNMENT = 16
"""Rows begin at multiples of this many bytes."""


def _num_blocks(pieces: Sequence[slice]) -> int:
    longest: int = max(piece.stop - piece.start for piece in pieces)
    return -(-longest // BLOCK)


class PackedReduceScatter:
    """Leaves each rank the float32 sum of its own piece, summed in the order of the ranks.

    Flags, one byte each, travel unpacked behind the rows; every rank gets their maximum.

    Args:
        pieces: The ranks' pieces of the numbers.
        num_flags: Number of flags.
        code: How numbers are packed.
        rank: This rank's number among those that sum.
        device: The device of the numbers.
    """

    def __init__(
        self,
        pieces: Sequence[slice],
        num_flags: int,
        code: CodeName,
        *,
        rank: int,
        device: torch.device,
    ) -> None:
        self._codec = Codec(code)
        self._pieces = pieces
        self._own = pieces[rank]
        self._num_flags = num_flags
        self._packed_bytes = self._codec.row_bytes(_num_blocks(pieces))
        self._row_bytes = -(-(self._packed_bytes + num_flags) // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
        self._device = device
        self.left_out = torch.zeros(pieces[-1].stop, device=device)
        """What this rank's messages have left out of its numbers."""

    @property
    def message_bytes(self) -> int:
        """Bytes of all rows, as of the tensor of an uncompressed reduce-scatter."""
        return len(self._pieces) * self._row_bytes

    def run(self, numbers: Tensor, flags: Tensor | None, group: dist.ProcessGroup) -> None:
        """Replaces the own piece with its sum over the ranks, and flags with their maximum."""
        shape = len(self._pieces), self._row_bytes
        rows = torch.empty(shape, dtype=torch.uint8, device=self._device)
        flag_columns = slice(self._packed_bytes, self._packed_bytes + self._num_flags)
        for piece, row in zip(self._pieces, rows.unbind(), strict=True):
            packed = row[: self._packed_bytes]
            self._codec.pack(numbers[piece], self.left_out[piece], packed)
        if flags is not None:
            rows[:, flag_columns] = flags.to(torch.uint8)
        received, arriving = start_all_to_all(rows, group)
        arriving.wait()
        own = numbers[self._own]
        for source, row in enumerate(received.unbind()):
            self._codec.unpack(row[: self._packed_bytes], own, adds=source > 0)
        if flags is not None:
            flags.copy_(received[:, flag_columns].amax(0))


class PackedAllGather:
    """Gives all ranks every rank's piece in 8 bits; all ranks, the sender included, get the same.

    Args:
        pieces: The ranks' pieces.
        rank: This rank's number among those that gather.
        device: The device of the numbers.
    """

    def __init__(self, pieces: Sequence[slice], *, rank: int, device: torch.device) -> None:
        self._codec = Codec("int8")
        self._pieces = pieces
        self._rank = rank
        self._row_bytes = self._codec.row_bytes(_num_blocks(pieces))
        self._device = device

    @property
    def message_bytes(self) -> int:
        """Bytes of all rows, as of the tensor of an uncompressed all-gather."""
        return len(self._pieces) * self._row_bytes

    def run(
        self, own: Tensor, left_out: Tensor, target: Tensor, group: dist.ProcessGroup, *, adds: bool
    ) -> None:
        """Writes all ranks' pieces to the target, or adds them to it.

        Args:
            own: This rank's piece.
            left_out: What earlier messages have left out of it, and then what this one does.
            target: As long as all pieces.
            group: The ranks.
            adds: Whether to add instead of to overwrite.
        """
        shape = len(self._pieces), self._row_bytes
        rows = torch.empty(shape, dtype=torch.uint8, device=self._device)
        self._codec.pack(own, left_out, rows[self._rank])
        borders = range(0, rows.numel() + 1, self._row_bytes)
        start_all_gather(rows.view(-1), borders, group).wait()
        for piece, row in zip(self._pieces, rows.unbind(), strict=True):
            self._codec.unpack(row, target[piece], adds=adds)
