"""Rows of a message between sites: packed numbers, and a checksum that says which row it is.

TCP's own checksum misses one damaged segment in some ten million, and says nothing about memory of
hosts on the way. The receiver of a row therefore verifies a hash of all of it.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.core.outer import CODES, OuterCompression
from paceline.parallel.compression.codec import BLOCK, Codec
from paceline.parallel.digest import digest

_ALIGNMENT = 16
"""Rows begin at multiples of this many bytes, so that all of their 64-bit words are aligned."""
_CHECKSUM_BYTES = 8


class Packing(Protocol):
    """A way to pack float32 numbers; `Codec` is one, too."""

    def row_bytes(self, num_blocks: int) -> int:
        """Returns the bytes of so many blocks."""

    def pack(self, values: Tensor, residual: Tensor, row: Tensor) -> None:
        """Packs numbers and what was left of earlier ones; the residual is what is left now."""

    def unpack(self, row: Tensor, target: Tensor, *, adds: bool) -> None:
        """Writes or adds the first numbers of a row to a tensor."""


class PlainPacking:
    """Numbers in a dtype, without a residual.

    Args:
        dtype: float32 or bfloat16.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def row_bytes(self, num_blocks: int) -> int:
        """Returns the bytes of so many blocks."""
        return num_blocks * BLOCK * self._dtype.itemsize

    def pack(self, values: Tensor, residual: Tensor, row: Tensor) -> None:
        """Writes the numbers to a row, and zeros behind them; the residual is not used."""
        numbers = row.view(self._dtype)
        numbers[: values.numel()] = values
        numbers[values.numel() :] = 0

    def unpack(self, row: Tensor, target: Tensor, *, adds: bool) -> None:
        """Writes or adds the first numbers of a row to a tensor."""
        numbers = row.view(self._dtype)[: target.numel()]
        target.add_(numbers) if adds else target.copy_(numbers)


def packing_of(compression: OuterCompression) -> Packing:
    """Returns the packing of a compression."""
    if compression == "int8" or compression == "int4":
        return Codec(compression)
    assert compression not in CODES
    return PlainPacking(torch.float32 if compression == "none" else torch.bfloat16)


class Rows:
    """Writes and verifies rows of some blocks each.

    Args:
        packing: How numbers are packed.
        num_blocks: Blocks of a row.
        device: The device of the numbers.
    """

    def __init__(self, packing: Packing, num_blocks: int, device: torch.device) -> None:
        self._packing = packing
        self._packed_bytes = packing.row_bytes(num_blocks)
        self._device = device
        used = self._packed_bytes + _CHECKSUM_BYTES
        self.row_bytes = -(-used // _ALIGNMENT) * _ALIGNMENT
        """Size of a row."""

    def empty(self, num_rows: int) -> Tensor:
        """Returns rows without content."""
        return torch.zeros(num_rows, self.row_bytes, dtype=torch.uint8, device=self._device)

    def write(self, row: Tensor, values: Tensor, residual: Tensor, seal: int) -> None:
        """Packs numbers into a row, and adds its checksum.

        The seal says which row it is. It takes part in the checksum, so that neither a row of zeros
        nor one from elsewhere passes for it.
        """
        self._packing.pack(values, residual, row[: self._packed_bytes])
        _checksum(row).copy_(digest(row[:-_CHECKSUM_BYTES]) + seal)

    def read(self, row: Tensor, target: Tensor, *, adds: bool) -> None:
        """Writes or adds the numbers of a row to a tensor."""
        self._packing.unpack(row[: self._packed_bytes], target, adds=adds)

    def damaged(self, rows: Tensor, seals: Sequence[int]) -> list[int]:
        """Returns the numbers of the rows that are not as they were written; waits for them."""
        pairs = zip(rows, seals, strict=True)
        differ = [
            digest(row[:-_CHECKSUM_BYTES]) + seal != _checksum(row).squeeze() for row, seal in pairs
        ]
        return [number for number, found in enumerate(torch.stack(differ).tolist()) if found]


def _checksum(row: Tensor) -> Tensor:
    return row[-_CHECKSUM_BYTES:].view(torch.int64)
