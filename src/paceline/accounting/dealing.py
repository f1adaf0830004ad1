"""Dealing out whole things to ranks: the largest first, each to the rank that has least so far."""

import heapq
from collections.abc import Sequence


def deal_out(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """Returns who gets each thing; of ranks that have equally much, the first.

    Args:
        sizes: Of the things.
        loads: What each rank has so far; what it gets is added.
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
