"""Where a layer's parameters lie: in each rank's flat shard, in what is gathered, in a message.

A parameter's rows (its first dimension) are cut into one piece per rank, all equally many but for
the last ones, which may have fewer or none: torch's `Shard(0)`. A rank's pieces of all parameters
of a layer lie one behind another in its flat shard, each filled up to the same length on every rank
and to 16 bytes.

What is gathered is a *run* of the flat shard: ``[rank][run]``. Where a run is one parameter, that
is the full parameter as it stands, so large ones travel by themselves and are used where they
arrive. Small ones travel together, as each message has a price, and are copied out. A message of
gradients is ``[rank][flat shard, one number per parameter]``.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paceline.accounting.communication.buckets import aligned
from paceline.core.units import MIB

_ALONE_BYTES = MIB
"""A full parameter of so many bytes travels by itself: copying it out costs more than a message."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """A parameter's place in every rank's flat shard."""

    shape: torch.Size
    rows: int
    """Of its first dimension, on a rank that has as many as any."""
    offset: int
    num_elements: int
    """Of a rank that has as many as any."""

    def num_rows(self, shard: int) -> int:
        """Returns how many rows a rank has."""
        length = self.shape[0] if self.shape else 1
        return max(0, min(self.rows, length - shard * self.rows))

    def local(self, flat: Tensor, shard: int) -> Tensor:
        """Returns a rank's rows in its flat shard, shaped."""
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

        Two pairs at most, however many ranks there are.

        Args:
            rows: One row per rank, of its flat shard.
            full: The parameter, or its gradient.
            begin: Where in the flat shard the rows begin.
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
    """Elements of the flat shard that are gathered in one message."""

    begin: int
    end: int
    is_one: bool
    """Whether what arrives is a full parameter as it stands."""

    def __contains__(self, piece: Piece) -> bool:
        return piece.num_elements > 0 and self.begin <= piece.offset < self.end


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerLayout:
    """The places of a layer's parameters, in their order."""

    dtype: torch.dtype
    device: torch.device
    num_shards: int
    pieces: tuple[Piece, ...]
    runs: tuple[Run, ...]
    length: int
    """Elements of a flat shard."""
    packed_length: int
    """Elements at its beginning that travel together."""

    @property
    def row_length(self) -> int:
        """Elements of a message for one rank."""
        return self.length + aligned(len(self.pieces), self.dtype.itemsize)

    def rows(self, run: Run, alone: Tensor, packed: Tensor) -> Tensor:
        """Returns where a run arrives, one row per rank.

        Args:
            run: The run.
            alone: What parameters that travel by themselves arrive in.
            packed: What those that travel together arrive in.
        """
        if not run.is_one:
            return packed.view(self.num_shards, self.packed_length)
        begin = self.place_alone(run.begin)
        length = run.end - run.begin
        return alone[begin : begin + length * self.num_shards].view(self.num_shards, length)

    def place_alone(self, offset: int) -> int:
        """Returns where a parameter that travels by itself arrives, by its place in the shard."""
        return (offset - self.packed_length) * self.num_shards

    def travels_alone(self, piece: Piece) -> bool:
        """Whether a full parameter is used where it arrives."""
        return any(run.is_one and piece in run for run in self.runs)


def lay_out(
    parameters: Sequence[Tensor], dtype: torch.dtype, device: torch.device, num_shards: int
) -> LayerLayout:
    """Places parameters in a flat shard.

    Args:
        parameters: Only their shapes and strides count.
        dtype: Theirs.
        device: Where they will be.
        num_shards: Over how many ranks.
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
