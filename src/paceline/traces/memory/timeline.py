"""Memory over one step, stacked by category.

Parameters, optimizer state and other memory that exists before the step are constant. Memory that
the step allocates is categorised as gradients if a parameter's gradient uses it at the end of
backward, as activations if it is live at the end of forward, and otherwise as temporary.
"""

import collections
import dataclasses
import enum
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from paceline.core.ranges import BACKWARD, FORWARD
from paceline.traces.memory.allocations import Allocation, AllocationTrace


class Category(enum.StrEnum):
    """Purposes of memory."""

    PARAMETERS = "parameters"
    OPTIMIZER_STATE = "optimizer_state"
    OTHER = "other"
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"
    TEMPORARY = "temporary"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllocationGroup:
    """Allocations with the same size, place, operator and category."""

    category: Category
    num_bytes: int
    """Size of one allocation."""
    operator: str
    place: str
    count: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryTimeline:
    """Bytes by category over time, downsampled to the peaks."""

    times_s: list[float]
    """Seconds from the start of the step."""
    num_bytes: dict[Category, list[int]]
    peak_bytes: int
    peak_by_category: dict[Category, int]
    phases_s: dict[str, tuple[float, float]]
    largest: list[AllocationGroup]
    """Groups of allocations, in descending order of allocation size."""


def memory_timeline(
    trace: AllocationTrace,
    *,
    resident: Mapping[Category, int],
    gradient_addresses: Collection[int],
    num_points: int = 400,
    num_largest: int = 10,
) -> MemoryTimeline:
    """Stacks a step's memory on top of the `resident` memory.

    `gradient_addresses` are the addresses of gradients at the end of backward. Time is divided
    into `num_points` intervals, and the moment with the most memory is kept for each. At most
    `num_largest` groups of allocations are returned.
    """
    categorized = [
        (_category(allocation, trace.ranges, gradient_addresses), allocation)
        for allocation in trace.allocations
    ]
    changes: list[tuple[float, Category, int]] = []
    for category, allocation in categorized:
        changes.append((allocation.start, category, allocation.num_bytes))
        if allocation.end is not None:
            changes.append((allocation.end, category, -allocation.num_bytes))
    changes.sort(key=lambda change: change[0])
    order = list(Category)
    deltas = np.zeros((len(changes) + 1, len(order)), dtype=np.int64)
    deltas[0] = [resident.get(category, 0) for category in order]
    for row, (_, category, num_bytes) in enumerate(changes, start=1):
        deltas[row, order.index(category)] = num_bytes
    stacked = deltas.cumsum(axis=0)
    begin = min((start for start, _ in trace.ranges.values()), default=0.0)
    times = np.array([begin, *(time for time, _, _ in changes)])
    totals = stacked.sum(axis=1)
    kept = _kept(times, totals, num_points)
    peak = int(np.argmax(totals))
    return MemoryTimeline(
        times_s=((times[kept] - begin) / 1e6).tolist(),
        num_bytes=dict(zip(order, stacked[kept].T.tolist(), strict=True)),
        peak_bytes=int(totals[peak]),
        peak_by_category=dict(zip(order, stacked[peak].tolist(), strict=True)),
        phases_s={
            name: ((start - begin) / 1e6, (end - begin) / 1e6)
            for name, (start, end) in trace.ranges.items()
        },
        largest=_largest(categorized, num_largest),
    )


def _largest(
    categorized: Sequence[tuple[Category, Allocation]], num_largest: int
) -> list[AllocationGroup]:
    counts = collections.Counter(
        (allocation.num_bytes, category, allocation.operator, allocation.place)
        for category, allocation in categorized
    )
    return [
        AllocationGroup(
            category=category, num_bytes=num_bytes, operator=operator, place=place, count=count
        )
        for (num_bytes, category, operator, place), count in sorted(
            counts.items(), key=lambda item: (-item[0][0], -item[1])
        )[:num_largest]
    ]


def _category(
    allocation: Allocation, ranges: Mapping[str, tuple[float, float]], gradients: Collection[int]
) -> Category:
    if BACKWARD not in ranges:
        return Category.TEMPORARY  # Without backward there are no activations to keep.
    if allocation.address in gradients and _lives_at(allocation, ranges[BACKWARD][1]):
        return Category.GRADIENTS
    if _lives_at(allocation, ranges[FORWARD][1]):
        return Category.ACTIVATIONS
    return Category.TEMPORARY


def _lives_at(allocation: Allocation, moment: float) -> bool:
    return allocation.start <= moment and (allocation.end is None or allocation.end > moment)


def _kept(times: np.ndarray, totals: np.ndarray, num_points: int) -> list[int]:
    """Returns the index with the most memory in each interval of time, and the last index."""
    span = max(float(times[-1] - times[0]), 1e-9)
    stretch = np.minimum(((times - times[0]) / span * num_points).astype(int), num_points - 1)
    most: dict[int, int] = {}
    for index, number in enumerate(stretch.tolist()):
        if number not in most or totals[index] > totals[most[number]]:
            most[number] = index
    return sorted({*most.values(), len(times) - 1})
