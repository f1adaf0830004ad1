"""Division of gradients into buckets, as our containers and torch's do it, and equal shards.

Sizes are given in backward order, the last layers first. In our containers, a tensor larger than
the cap gets its own bucket. The first and the last buckets are small; from both ends, sizes grow by
a factor of 1.5 up to the cap. Small buckets at the beginning start communication early. Shrinking
buckets towards the end let each transfer finish before the next bucket is ready, so that only the
last one, which cannot start before backward ends, is exposed. With this growth, each transfer
finishes in time if backward takes at least 1.5 times as long as communication.

torch's DistributedDataParallel closes a bucket once it reaches the cap, so a bucket may exceed the
cap by its last tensor. If no cap is given, the cap is 25 MiB, and 1 MiB for the first bucket.

A unit stores tensors one after the other, each at a multiple of 16 bytes, and is padded so that all
shards are equal and begin at a multiple of 16 bytes as well. A rank owns the tensors, or pieces of
tensors, in its shard. Padding belongs to no rank, but takes memory.
"""

import dataclasses
import heapq
import itertools
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from paceline.core.strategies import DEFAULT_BUCKET_SIZE_MB
from paceline.core.units import MIB

EDGE_BYTES = MIB
"""Size at which our first and last buckets are full."""

GROUP_BYTES = MIB
"""Gradients are copied into our buckets in groups of at least this size, except the last."""

_TORCH_FIRST_BYTES = MIB
_GROWTH = 1.5
_ALIGNMENT_BYTES = 16  # The widest load of a GPU thread.

Tensor = TypeVar("Tensor")


def aligned(num_elements: int, element_bytes: int) -> int:
    """Rounds up so that the next tensor starts aligned."""
    alignment = _ALIGNMENT_BYTES // element_bytes
    return -(-num_elements // alignment) * alignment


def equal_share(num_elements: int, num_ranks: int, element_bytes: int) -> int:
    """Returns the elements of each rank's shard, padded so that every shard starts aligned."""
    return aligned(-(-num_elements // num_ranks), element_bytes)


def divide_into_buckets(
    tensors: Sequence[Tensor], sizes: Sequence[int], cap_bytes: float | None
) -> list[Sequence[Tensor]]:
    """Divides tensors with these `sizes` in bytes into our buckets, in launch order.

    Without a cap there is one bucket; with a cap of zero there is one per tensor.
    """
    if cap_bytes is None:
        return [tensors]
    tail = _fill_groups(sizes[::-1], cap_bytes, stop_at_cap=True)
    head = _fill_groups(sizes[: len(sizes) - sum(tail)], cap_bytes)
    return _cut(tensors, [*head, *reversed(tail)])


def divide_as_torch(
    tensors: Sequence[Tensor], sizes: Sequence[int], cap_bytes: float | None
) -> list[Sequence[Tensor]]:
    """Divides tensors with these `sizes` in bytes into buckets as DistributedDataParallel does."""
    enough: float = _TORCH_FIRST_BYTES if cap_bytes is None else cap_bytes
    lengths: list[int] = []
    length = num_bytes = 0
    for size in sizes:
        length += 1
        num_bytes += size
        if num_bytes >= enough:
            lengths.append(length)
            length = num_bytes = 0
            enough = DEFAULT_BUCKET_SIZE_MB * MIB if cap_bytes is None else cap_bytes
    return _cut(tensors, [*lengths, length] if length else lengths)


def _cut(tensors: Sequence[Tensor], lengths: Sequence[int]) -> list[Sequence[Tensor]]:
    ends = itertools.accumulate(lengths)
    return [tensors[end - length : end] for length, end in zip(lengths, ends, strict=True)]


def _fill_groups(sizes: Sequence[int], cap_bytes: float, *, stop_at_cap: bool = False) -> list[int]:
    """Returns the lengths of groups whose target size grows by `_GROWTH` up to the cap.

    No group exceeds the cap, unless it holds a single tensor. With `stop_at_cap`, filling stops
    once the target size reaches the cap, and the remaining tensors are left out.
    """
    lengths: list[int] = []
    enough = min(EDGE_BYTES, cap_bytes)
    length = num_bytes = 0
    for index, size in enumerate(sizes):
        length += 1
        num_bytes += size
        next_size = sizes[index + 1] if index + 1 < len(sizes) else 0
        if num_bytes >= enough or num_bytes + next_size > cap_bytes:
            lengths.append(length)
            length = num_bytes = 0
            enough = min(_GROWTH * enough, cap_bytes)
            if stop_at_cap and enough == cap_bytes:
                return lengths
    return [*lengths, length] if length else lengths


def assign_largest_first(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """Returns the rank assigned to each size: largest first, each to the least loaded rank.

    Ties go to the lowest rank. `loads` holds the load of each rank and is updated in place.
    """
    lightest = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(lightest)
    owners = [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        load, rank = heapq.heappop(lightest)
        owners[place] = rank
        loads[rank] = load + sizes[place]
        heapq.heappush(lightest, (loads[rank], rank))
    return owners


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
