"""How many elements every rank owns where flat tensors are cut into equal shards.

Tensors lie one behind another in a unit, each at a multiple of 16 bytes. The unit is padded so
that all shards are equal and each begins at such a multiple as well. A rank owns whatever tensors,
or pieces of them, lie in its shard; the padding belongs to no rank, but takes memory.
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
    """Tensors that each rank owns something of."""
    span: "npt.NDArray[np.int64]"
    """Elements from the first to the last that each rank owns, padding between them included."""


def cut_unit(sizes: Sequence[int], world_size: int, element_bytes: int) -> UnitShares:
    """Cuts tensors of these sizes, which lie in this order."""
    ends_aligned = np.cumsum([aligned(size, element_bytes) for size in sizes])
    starts = np.concatenate(([0], ends_aligned[:-1]))
    ends = starts + np.asarray(sizes)
    share = equal_share(int(ends_aligned[-1]), world_size, element_bytes)
    borders = share * np.arange(world_size + 1)
    begun = np.searchsorted(starts, borders, side="left")
    whole = np.concatenate(([0], np.cumsum(sizes)))
    last = np.maximum(begun - 1, 0)
    # Of the last tensor that has begun before a border, what lies beyond it does not count.
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
