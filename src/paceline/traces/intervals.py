"""Sets of instants on a timeline, as sorted, disjoint intervals of integer nanoseconds.

A set is an array of shape (n, 2): starts and exclusive ends. Integers make sums exact.
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Intervals: TypeAlias = npt.NDArray[np.int64]

EMPTY: Intervals = np.empty((0, 2), dtype=np.int64)


def union(starts: npt.ArrayLike, ends: npt.ArrayLike, *, gap: int = 0) -> Intervals:
    """Merges intervals in any order; those at most `gap` apart become one."""
    start = np.asarray(starts, dtype=np.int64)
    end = np.asarray(ends, dtype=np.int64)
    not_empty = end > start
    start, end = start[not_empty], end[not_empty]
    if not start.size:
        return EMPTY
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    begins = np.flatnonzero(np.concatenate(([True], start[1:] > reach[:-1] + gap)))
    return np.stack((start[begins], reach[np.append(begins[1:], start.size) - 1]), axis=1)


def length(intervals: Intervals) -> int:
    """Returns the total length of a set."""
    return int((intervals[:, 1] - intervals[:, 0]).sum())


def clip(intervals: Intervals, start: int, end: int) -> Intervals:
    """Restricts a set to the interval from `start` to `end`."""
    clipped = np.clip(intervals, start, end)
    return clipped[clipped[:, 1] > clipped[:, 0]]


def complement(intervals: Intervals, start: int, end: int) -> Intervals:
    """Returns the part of the interval from `start` to `end` that is not in the set."""
    inside = clip(intervals, start, end)
    starts = np.concatenate(([start], inside[:, 1]))
    ends = np.concatenate((inside[:, 0], [end]))
    return union(starts, ends)


def intersection(first: Intervals, second: Intervals) -> Intervals:
    """Returns the intersection of two sets."""
    if not (first.size and second.size):
        return EMPTY
    # Intervals of one set that begin inside the other; then the same with the sets swapped.
    starts, ends = [], []
    for inner, outer in ((first, second), (second, first)):
        index = np.searchsorted(outer[:, 0], inner[:, 0], side="right") - 1
        inside = (index >= 0) & (outer[index, 1] > inner[:, 0])
        starts.append(inner[inside, 0])
        ends.append(np.minimum(inner[inside, 1], outer[index[inside], 1]))
    return union(np.concatenate(starts), np.concatenate(ends))


def covered(intervals: Intervals, starts: npt.ArrayLike, ends: npt.ArrayLike) -> Intervals:
    """Returns the length of each interval's overlap with the set."""
    return _length_before(intervals, ends) - _length_before(intervals, starts)


def overlap(first: Intervals, second: Intervals) -> int:
    """Returns the total length of the intersection of two sets."""
    return int(covered(first, second[:, 0], second[:, 1]).sum())


def _length_before(intervals: Intervals, moments: npt.ArrayLike) -> Intervals:
    """Returns the length of the part of the set before each moment."""
    moment = np.asarray(moments, dtype=np.int64)
    if not intervals.size:
        return np.zeros(moment.shape, dtype=np.int64)
    starts, ends = intervals[:, 0], intervals[:, 1]
    before = np.concatenate(([0], np.cumsum(ends - starts)))
    index = np.searchsorted(starts, moment, side="right")
    last = np.maximum(index - 1, 0)
    # Subtract the part of the last started interval that lies after the moment.
    excess = np.where(index > 0, np.maximum(ends[last] - moment, 0), 0)
    return before[index] - excess
