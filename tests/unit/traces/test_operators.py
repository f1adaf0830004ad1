"""Tests of the event that each instant belongs to, against a check of every instant."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.traces.operators import self_times

_EVENTS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 12)).map(lambda pair: (pair[0], sum(pair))),
    max_size=14,
)


@given(_EVENTS)
def test_each_instant_belongs_to_the_event_that_began_last(events: list[tuple[int, int]]) -> None:
    expected = [0] * len(events)
    for instant in range(50):
        open_events = [
            # The latest start wins; then the shorter event; then the later in the list.
            ((start, -end, index), index)
            for index, (start, end) in enumerate(events)
            if start <= instant < end
        ]
        if open_events:
            expected[max(open_events)[1]] += 1
    starts, ends = np.array(events, dtype=np.int64).reshape(-1, 2).T
    assert self_times(starts, ends).tolist() == expected


def test_a_caller_keeps_what_its_calls_leave() -> None:
    starts = np.array([0, 10, 20, 60])
    ends = np.array([100, 50, 30, 70])
    assert self_times(starts, ends).tolist() == [50, 30, 10, 10]
