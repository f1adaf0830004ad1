"""Tests of interval sets against plain Python sets of instants."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.traces import intervals
from paceline.traces.intervals import Intervals

_PAIRS = st.lists(
    st.tuples(st.integers(-20, 60), st.integers(0, 12)).map(lambda pair: (pair[0], sum(pair))),
    max_size=12,
)


def _instants(pairs: list[tuple[int, int]] | Intervals) -> set[int]:
    return {instant for start, end in pairs for instant in range(start, end)}


def _union(pairs: list[tuple[int, int]]) -> Intervals:
    return intervals.union([start for start, _ in pairs], [end for _, end in pairs])


@given(_PAIRS)
def test_a_union_is_sorted_disjoint_and_complete(pairs: list[tuple[int, int]]) -> None:
    joined = _union(pairs)
    assert _instants(joined) == _instants(pairs)
    assert (joined[:, 1] > joined[:, 0]).all()
    assert (joined[1:, 0] > joined[:-1, 1]).all()
    assert intervals.length(joined) == len(_instants(pairs))


@given(_PAIRS, st.integers(0, 5))
def test_short_gaps_are_closed_and_long_ones_are_not(
    pairs: list[tuple[int, int]], gap: int
) -> None:
    plain = _union(pairs)
    closed = intervals.union(plain[:, 0], plain[:, 1], gap=gap)
    expected = _instants(pairs)
    for (_, end), (start, _) in itertools.pairwise(plain):
        if start - end <= gap:
            expected |= set(range(end, start))
    assert _instants(closed) == expected


@given(_PAIRS, _PAIRS)
def test_what_two_sets_have_in_common(
    first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    expected = _instants(first) & _instants(second)
    common = intervals.intersection(_union(first), _union(second))
    assert _instants(common) == expected
    assert intervals.overlap(_union(first), _union(second)) == len(expected)


@given(_PAIRS, st.integers(-25, 30), st.integers(0, 60))
def test_inside_and_outside_of_a_window(
    pairs: list[tuple[int, int]], start: int, duration: int
) -> None:
    window = set(range(start, start + duration))
    joined = _union(pairs)
    clipped = intervals.clip(joined, start, start + duration)
    assert _instants(clipped) == _instants(pairs) & window
    outside = intervals.complement(joined, start, start + duration)
    assert _instants(outside) == window - _instants(pairs)


@given(_PAIRS, _PAIRS)
def test_how_much_of_each_interval_is_covered(
    pairs: list[tuple[int, int]], others: list[tuple[int, int]]
) -> None:
    starts, ends = np.array(others, dtype=np.int64).reshape(-1, 2).T
    covered = intervals.covered(_union(pairs), starts, ends)
    assert covered.tolist() == [len(_instants([other]) & _instants(pairs)) for other in others]
