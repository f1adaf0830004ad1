"""Tests the overlap simulator against hand calculation, the recurrence and the planner's bound."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.accounting.overlap import (
    NO_CONTENTION,
    ComputeSegment,
    Contention,
    Transfer,
    least_exposed_s,
    simulate_buckets,
    simulate_overlap,
)


def _transfer(seconds: float, after: int, contention: Contention = NO_CONTENTION) -> Transfer:
    return Transfer(seconds=seconds, num_bytes=100, after=after, contention=contention)


def test_what_ends_after_compute_is_exposed() -> None:
    segments = [ComputeSegment(seconds=2.0), ComputeSegment(seconds=2.0)]
    # The first transfer runs from 2 to 5, the second from 5 to 6; compute ends at 4.
    simulated = simulate_overlap(segments, [_transfer(3.0, 1), _transfer(1.0, 2)])
    assert simulated.exposed_s == pytest.approx(2.0)
    assert simulated.lost_s == 0
    assert simulate_overlap(segments, [_transfer(3.0, 1)], wait_for_all=False).exposed_s == 0


def test_a_segment_waits_for_the_transfers_that_it_needs() -> None:
    segments = [
        ComputeSegment(seconds=1.0),
        ComputeSegment(seconds=1.0, needs=1),
        ComputeSegment(seconds=1.0, needs=2),
    ]
    simulated = simulate_overlap(
        segments, [_transfer(2.0, 0), _transfer(3.0, 1)], wait_for_all=False
    )
    # Compute waits from 1 to 2 for the first transfer, and from 3 to 5 for the second.
    assert simulated.exposed_s == pytest.approx(1.0 + 2.0)


def test_both_slow_each_other_while_both_go_on() -> None:
    # During compute, the transfer takes 4 s instead of 2 and costs compute 0.5 s.
    contention = Contention(lost_s_per_byte=0.005, slowdown=2.0)
    simulated = simulate_overlap([ComputeSegment(seconds=10.0)], [_transfer(2.0, 0, contention)])
    assert simulated.lost_s == pytest.approx(0.5)
    assert simulated.exposed_s == 0
    # Compute of 1.75 s ends at 2 s with half of the transfer left, which then runs at full speed.
    simulated = simulate_overlap([ComputeSegment(seconds=1.75)], [_transfer(2.0, 0, contention)])
    assert simulated.lost_s == pytest.approx(0.25)
    assert simulated.exposed_s == pytest.approx(1.0)


@given(
    st.lists(st.floats(0.01, 10), min_size=1, max_size=8),
    st.lists(st.floats(0.01, 10), max_size=8),
    st.floats(0, 1),
    st.floats(1, 5),
)
def test_messages_never_cost_more_than_alone(
    pieces: list[float], messages: list[float], lost: float, slowdown: float
) -> None:
    contention = Contention(lost_s_per_byte=lost, slowdown=slowdown)
    transfers = [
        _transfer(seconds, min(number, len(pieces)), contention)
        for number, seconds in enumerate(messages)
    ]
    simulated = simulate_overlap([ComputeSegment(seconds=seconds) for seconds in pieces], transfers)
    assert simulated.lost_s + simulated.exposed_s <= sum(messages) * (1 + 1e-9)


def test_lanes_that_wait_for_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="segment 0 waits"):
        simulate_overlap([ComputeSegment(seconds=1.0, needs=1)], [_transfer(1.0, 1)])


_SECONDS = st.floats(0, 10)


@given(st.lists(st.tuples(st.floats(0, 5), _SECONDS), max_size=20))
def test_without_contention_it_is_the_recurrence(buckets: list[tuple[float, float]]) -> None:
    ready = [ready for ready, _ in buckets]
    transfers = [seconds for _, seconds in buckets]
    simulated = simulate_buckets(ready, transfers, 5.0)
    finish = 0.0
    for index in range(len(buckets)):
        start = max(ready[index], finish)
        finish = start + transfers[index]
        assert simulated.start_s[index] == pytest.approx(start, abs=1e-9)
        assert simulated.finish_s[index] == pytest.approx(finish, abs=1e-9)
    assert simulated.exposed_s == pytest.approx(max(0.0, finish - 5.0), abs=1e-9)
    assert simulated.lost_s == 0


def test_a_bucket_is_ready_before_backward_ends() -> None:
    with pytest.raises(ValueError, match=r"ready 1\.0 s after backward's end"):
        simulate_buckets([1.0, 3.0], [1.0, 1.0], 2.0)


@given(communication_s=st.floats(0, 10), backward_s=st.floats(0.01, 10))
def test_the_planners_bound_is_the_limit_of_many_buckets(
    communication_s: float, backward_s: float
) -> None:
    bound = float(least_exposed_s(communication_s, backward_s))
    for num_buckets in (1, 10, 1000):
        ready = [(index + 1) * backward_s / num_buckets for index in range(num_buckets - 1)]
        transfers = [communication_s / num_buckets] * num_buckets
        exposed_s = simulate_buckets([*ready, backward_s], transfers, backward_s).exposed_s
        assert exposed_s >= bound - 1e-9
    assert exposed_s - bound <= max(communication_s, backward_s) / num_buckets + 1e-9
