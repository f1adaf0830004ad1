"""Number of elements that each rank owns of flat tensors that are cut into equal shards.

A unit stores tensors one after the other, each at a multiple of 16 bytes. It is padded so that all
shards are equal and each begins at a multiple of 16 bytes as well. A rank owns the tensors, or
pieces of tensors, in its shard. Padding belongs to no rank, but takes memory.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.accounting.communication.buckets import aligned, equal_share


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnitShares:
    """A unit's shards, by rank."""

    share: int
    """Elements of one shard, padding included."""
    num_owned: npt.NDArray[np.int64]
    """Elements of tensors in each rank's shard."""
    num_pieces: npt.NDArray[np.int64]
    """Number of tensors that each rank owns at least a piece of."""
    span: "npt.NDArray[np.int64]"
    """Elements from the first to the last that each rank owns, padding between them included."""


def cut_unit(sizes: Sequence[int], world_size: int, element_bytes: int) -> UnitShares:
    """Cuts a unit of tensors with these `sizes`, in storage order, into equal shards."""
    ends_aligned = np.cumsum([aligned(size, element_bytes) for size in sizes])
    starts = np.concatenate(([0], ends_aligned[:-1]))
    ends = starts + np.asarray(sizes)
    share = equal_share(int(ends_aligned[-1]), world_size, element_bytes)
    borders = share * np.arange(world_size + 1)
    begun = np.searchsorted(starts, borders, side="left")
    whole = np.concatenate(([0], np.cumsum(sizes)))
    last = np.maximum(begun - 1, 0)
    # The last tensor that begins before a border counts only up to the border.
    beyond = np.where(begun > 0, np.maximum(ends[last] - borders, 0), 0)
    num_before = whole[begun] - beyond
    ended = np.searchsorted(ends, borders, side="right")
    num_pieces = begun[1:] - ended[:-1]
    first = np.maximum(starts[np.minimum(ended[:-1], len(sizes) - 1)], borders[:-1])
    final = np.minimum(ends[last[1:]], borders[1:])
    return UnitShares(
        share=share,
        num_owned=np.diff(num_before),
        num_pieces=num_pieces,
        span=np.where(num_pieces > 0, final - first, 0),
    )
