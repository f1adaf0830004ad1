"""The layout of a layer's parameters in flat shards, gathered buffers and gradient messages.

A parameter's rows (its first dimension) are divided into one piece per rank. All pieces have
equally many rows, except the last ones, which may have fewer or none: torch's `Shard(0)`. A rank's
pieces of all parameters of a layer are concatenated in its flat shard, each padded to the same
length on every rank and to 16 bytes.

An all-gather collects a *run* of the flat shards: ``[rank][run]``. If a run is one parameter, the
result is the full parameter, without a copy. Large parameters are therefore separate runs, and are
used in the receive buffer. Small parameters share a run, because each message has a cost, and are
copied out. A gradient message is ``[rank][flat shard, one flag per parameter]``.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paceline.accounting.buckets import aligned
from paceline.core.units import MIB

_ALONE_BYTES = MIB
"""Full parameters from this size on are separate runs: a copy would cost more than a message."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """A parameter's position in every rank's flat shard."""

    shape: torch.Size
    rows: int
    """Maximum number of rows of a rank."""
    offset: int
    num_elements: int
    """Maximum number of elements of a rank."""

    def num_rows(self, shard: int) -> int:
        """Returns the number of rows of a rank."""
        length = self.shape[0] if self.shape else 1
        return max(0, min(self.rows, length - shard * self.rows))

    def local(self, flat: Tensor, shard: int) -> Tensor:
        """Returns a rank's rows as a shaped view of its flat shard."""
        num_rows = self.num_rows(shard)
        width = self.num_elements // self.rows if self.rows else 0
        shape = (num_rows, *self.shape[1:]) if self.shape else ()
        return flat[self.offset : self.offset + num_rows * width].view(shape)

    def own_rows(self, full: Tensor, shard: int) -> Tensor:
        """Returns a rank's rows of the full parameter."""
        return full.narrow(0, min(shard * self.rows, full.shape[0]), self.num_rows(shard))

    def blocks(
        self, rows: Tensor, full: Tensor, *, begin: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields views of all ranks' pieces, and the same elements of the full parameter.

        There are at most two pairs, regardless of the number of ranks.

        Args:
            rows: One row per rank, a slice of its flat shard.
            full: The parameter or its gradient.
            begin: Start of the slice in the flat shard.
        """
        if not self.num_elements:
            return
        offset = self.offset - begin
        full = full if full.dim() else full.unsqueeze(0)
        num_whole, rest = divmod(full.shape[0], self.rows)
        if num_whole:
            pieces = rows[:num_whole, offset : offset + self.num_elements]
            rest_of_shape = full.shape[1:]
            yield (
                pieces.view(num_whole, self.rows, *rest_of_shape),
                full[: num_whole * self.rows].view(num_whole, self.rows, *rest_of_shape),
            )
        if rest:
            length = rest * (self.num_elements // self.rows)
            last = rows[num_whole, offset : offset + length].view(rest, *full.shape[1:])
            yield last, full[num_whole * self.rows :]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A range of the flat shard that is gathered in one message."""

    begin: int
    end: int
    is_one: bool
    """Whether the run is one parameter, so that the gathered buffer is the full parameter."""

    def __contains__(self, piece: Piece) -> bool:
        return piece.num_elements > 0 and self.begin <= piece.offset < self.end


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerLayout:
    """The positions of a layer's parameters."""

    dtype: torch.dtype
    device: torch.device
    num_shards: int
    pieces: tuple[Piece, ...]
    runs: tuple[Run, ...]
    length: int
    """Elements of a flat shard."""
    packed_length: int
    """Elements at its beginning that are gathered together."""

    @property
    def row_length(self) -> int:
        """Elements of a gradient message for one rank."""
        return self.length + aligned(len(self.pieces), self.dtype.itemsize)

    def rows(self, run: Run, alone: Tensor, packed: Tensor) -> Tensor:
        """Returns the receive buffer of a run, one row per rank.

        Args:
            run: The run.
            alone: Receive buffer of parameters that are separate runs.
            packed: Receive buffer of parameters that are gathered together.
        """
        if not run.is_one:
            return packed.view(self.num_shards, self.packed_length)
        begin = self.place_alone(run.begin)
        length = run.end - run.begin
        return alone[begin : begin + length * self.num_shards].view(self.num_shards, length)

    def place_alone(self, offset: int) -> int:
        """Returns the position in `alone` of a separate parameter, by its offset in the shard."""
        return (offset - self.packed_length) * self.num_shards

    def travels_alone(self, piece: Piece) -> bool:
        """Returns whether a parameter is a separate run, used in the receive buffer."""
        return any(run.is_one and piece in run for run in self.runs)


def lay_out(
    parameters: Sequence[Tensor], dtype: torch.dtype, device: torch.device, num_shards: int
) -> LayerLayout:
    """Places parameters in a flat shard.

    Args:
        parameters: The parameters; only shapes and strides matter.
        dtype: Their dtype.
        device: Their final device.
        num_shards: Number of ranks to shard over.
    """
    travels_alone = [
        parameter.is_contiguous()
        and (num_shards == 1 or parameter.numel() * dtype.itemsize >= _ALONE_BYTES)
        for parameter in parameters
    ]
    pieces: dict[int, Piece] = {}
    runs: list[Run] = []
    offset = packed_length = 0
    for alone in (False, True):
        begin = offset
        for index, parameter in enumerate(parameters):
            if travels_alone[index] is not alone:
                continue
            rows = -(-(parameter.shape[0] if parameter.dim() else 1) // num_shards)
            num_elements = rows * math.prod(parameter.shape[1:])
            pieces[index] = Piece(
                shape=parameter.shape, rows=rows, offset=offset, num_elements=num_elements
            )
            if alone and num_elements:
                runs.append(Run(begin=offset, end=offset + num_elements, is_one=True))
            offset += aligned(num_elements, dtype.itemsize)
        if not alone and offset > begin:
            runs.append(Run(begin=begin, end=offset, is_one=False))
            packed_length = offset
    return LayerLayout(
        dtype=dtype,
        device=device,
        num_shards=num_shards,
        pieces=tuple(pieces[index] for index in range(len(parameters))),
        runs=tuple(runs),
        length=offset,
        packed_length=packed_length,
    )
