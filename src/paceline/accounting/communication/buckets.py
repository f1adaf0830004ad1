"""How gradients are divided into buckets: by our containers, and by torch's.

Sizes are given in the order in which backward reaches the tensors, the last layers' first. Ours: a
tensor larger than the cap has a bucket of its own; the first and the last buckets are small, and
sizes grow by half from there up to the cap. At the beginning, so that communication starts early;
towards the end, so that each bucket has gone when the next is ready, and only the last, which can
start no sooner than backward ends, is left to wait for. With that growth each bucket has gone in
time where backward takes at least 1.5 times as long as communication.

torch's DistributedDataParallel ends a bucket when it holds as much as the cap, so that it may be
larger by its last tensor. Only where no cap is given, it takes 25 MiB and ends the first bucket
at one.
"""

import heapq
import itertools
from collections.abc import Sequence
from typing import TypeVar

from paceline.core.strategies import DEFAULT_BUCKET_SIZE_MB
from paceline.core.units import MIB

EDGE_BYTES = MIB
"""With so much, the first and the last bucket of ours are full."""

GROUP_BYTES = MIB
"""Gradients move into a bucket of ours together when they are so large, or its last ones."""

_TORCH_FIRST_BYTES = MIB
_GROWTH = 1.5
_ALIGNMENT_BYTES = 16  # The widest load of a GPU thread.

Tensor = TypeVar("Tensor")


def aligned(num_elements: int, element_bytes: int) -> int:
    """Rounds up to what may be followed by another tensor."""
    alignment = _ALIGNMENT_BYTES // element_bytes
    return -(-num_elements // alignment) * alignment


def equal_share(num_elements: int, num_ranks: int, element_bytes: int) -> int:
    """Returns the elements of each rank's shard, padded so that each begins aligned."""
    return aligned(-(-num_elements // num_ranks), element_bytes)


def divide_into_buckets(
    tensors: Sequence[Tensor], sizes: Sequence[int], cap_bytes: float | None
) -> list[Sequence[Tensor]]:
    """Divides tensors of these bytes into our buckets, in the order of their launch.

    Without a cap there is one bucket; a cap of zero makes one per tensor.
    """
    if cap_bytes is None:
        return [tensors]
    tail = _fill_groups(sizes[::-1], cap_bytes, stop_at_cap=True)
    head = _fill_groups(sizes[: len(sizes) - sum(tail)], cap_bytes)
    return _cut(tensors, [*head, *reversed(tail)])


def divide_as_torch(
    tensors: Sequence[Tensor], sizes: Sequence[int], cap_bytes: float | None
) -> list[Sequence[Tensor]]:
    """Divides tensors of these bytes into the buckets of torch's DistributedDataParallel."""
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
    """Returns the lengths of groups that are full with half as much again as the one before.

    None holds more than the cap, unless it holds a single tensor. With `stop_at_cap`, what would
    come after the groups that are smaller than the cap is left.
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
    """Returns the rank that gets each size; of ranks that have equally much, the first.

    `loads` is what each rank has so far; what it gets is added.
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
