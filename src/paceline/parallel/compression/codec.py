"""Numbers in 8 or 4 bits: blocks of 256, each with a scale in bf16.

A block's scale is its largest magnitude over the largest code, rounded up to bf16, so that no code
is clipped. Codes are rounded to nearest, ties to even. Code and scale have at most 15 significant
bits together, so a decoded number is exact in float32, and what was rounded away, the residual, is
too: it is added to the next numbers that are packed (error feedback).

A block that holds a number which is not finite has the scale NaN: all of it is NaN after unpacking,
on every rank, and its residual stays as it was. Blocks whose largest magnitude is below the
smallest normal float32 times the largest code are packed as zeros, and stay in the residual.

A row is the packed form of one piece of a message: all scales, then all codes. With 4 bits, byte j
of a block holds the codes of numbers j and j + 128, so that both halves are read in sequence.

Packing is bound by memory. On a CPU, numba compiles one pass over memory, if it is installed;
otherwise, and on accelerators, torch's operators take several. Both give the same bits.
"""

import dataclasses
import functools
import importlib.util
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

BLOCK = 256
"""Numbers that share a scale."""
CodeName = Literal["int8", "int4"]
_SCALE_BYTES = 2
_SMALLEST = torch.finfo(torch.float32).smallest_normal
_MANTISSA_BELOW_BF16 = 0xFFFF
_NAN = 0x7FC0
"""NaN in bf16."""


@functools.cache
def compiled_kernels() -> ModuleType | None:
    """Returns the compiled kernels for CPUs; None where numba is not installed."""
    if importlib.util.find_spec("numba") is None:
        return None
    from paceline.parallel.compression import kernels  # Compiling them takes seconds.

    return kernels


@dataclasses.dataclass(frozen=True)
class Codec:
    """One way to pack numbers."""

    name: CodeName
    uses_compiled: bool = True
    """Whether CPUs use the compiled kernels, if there are any."""

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 8 if self.name == "int8" else 4

    @property
    def largest(self) -> int:
        """The largest code; the smallest is its negative."""
        return (1 << (self.bits - 1)) - 1

    def row_bytes(self, num_blocks: int) -> int:
        """Returns the bytes of a row of blocks."""
        return num_blocks * (_SCALE_BYTES + BLOCK * self.bits // 8)

    def pack(self, values: Tensor, residual: Tensor, row: Tensor) -> None:
        """Packs float32 numbers and what was left of earlier ones into a row.

        Args:
            values: At most as many numbers as the row has space for; the rest are zeros.
            residual: Of as many numbers; afterwards, what this row leaves out.
            row: Bytes of the row, which are overwritten.
        """
        scales, codes = self._parts(row)
        kernels = self._kernels(row)
        if kernels is None:
            self._pack_with_operators(values, residual, scales, codes)
            return
        pack = kernels.pack_8_bits if self.bits == 8 else kernels.pack_4_bits
        pack(values.numpy(), residual.numpy(), scales.numpy(), codes.numpy())

    def unpack(self, row: Tensor, target: Tensor, *, adds: bool) -> None:
        """Writes the numbers of a row to a float32 tensor, or adds them to it.

        Args:
            row: A packed row.
            target: Space for all numbers of the row, or for the first of them.
            adds: Whether to add instead of to overwrite.
        """
        scales, codes = self._parts(row)
        kernels = self._kernels(row)
        if kernels is None:
            numbers = self._decoded(scales, codes)[: target.numel()]
            target.add_(numbers) if adds else target.copy_(numbers)
            return
        unpack = kernels.unpack_8_bits if self.bits == 8 else kernels.unpack_4_bits
        unpack(scales.numpy(), codes.numpy(), target.numpy(), adds)

    def _kernels(self, row: Tensor) -> ModuleType | None:
        return compiled_kernels() if self.uses_compiled and row.device.type == "cpu" else None

    def _parts(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """Returns a row's scales, as the bits of bf16, and its codes by block."""
        num_blocks = row.numel() // self.row_bytes(1)
        begin = num_blocks * _SCALE_BYTES
        scales = row[:begin].view(torch.int16)
        codes = row[begin : self.row_bytes(num_blocks)].view(num_blocks, BLOCK * self.bits // 8)
        return scales, codes

    def _pack_with_operators(
        self, values: Tensor, residual: Tensor, scales: Tensor, codes: Tensor
    ) -> None:
        num_numbers = len(scales) * BLOCK
        given = torch.zeros(num_numbers, dtype=torch.float32, device=values.device)
        given[: values.numel()] = values + residual
        blocks = given.view(-1, BLOCK)
        scale = _rounded_up(blocks.abs().amax(1) / self.largest)
        is_finite = scale.isfinite()
        is_counted = is_finite & (scale >= _SMALLEST)
        used = torch.where(is_counted, scale, 1)
        rounded = torch.where(is_counted[:, None], blocks * (1 / used)[:, None], 0).round_()
        left = (blocks - rounded * used[:, None]).view(-1)[: values.numel()]
        keeps = is_finite.repeat_interleave(BLOCK)[: values.numel()]
        residual.copy_(torch.where(keeps, left, residual))
        # By hand: torch's conversion of NaN to bf16 depends on the processor.
        bits = torch.where(is_counted, scale, 0).view(torch.int32) >> 16
        scales.copy_(torch.where(is_finite, bits, _NAN))
        if self.bits == 8:
            codes.copy_(rounded.to(torch.int8).view(torch.uint8))
        else:
            shifted = (rounded + 8).to(torch.uint8)
            codes.copy_(shifted[:, : BLOCK // 2] | (shifted[:, BLOCK // 2 :] << 4))

    def _decoded(self, scales: Tensor, codes: Tensor) -> Tensor:
        if self.bits == 8:
            numbers = codes.view(torch.int8).float()
        else:
            numbers = torch.cat([codes & 15, codes >> 4], dim=1).float() - 8
        return (numbers * scales.view(torch.bfloat16).float()[:, None]).view(-1)


def _rounded_up(magnitudes: Tensor) -> Tensor:
    """Returns float32 magnitudes rounded up to bf16, as float32; NaN stays NaN or becomes inf."""
    is_finite = magnitudes.isfinite()
    bits = torch.where(is_finite, magnitudes, 0).view(torch.int32)
    rounded = ((bits + _MANTISSA_BELOW_BF16) & ~_MANTISSA_BELOW_BF16).view(torch.float32)
    return torch.where(is_finite, rounded, torch.inf)
