"""Two lanes side by side, against arithmetic by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.prediction.calibration import Contention
from paceline.prediction.overlap_simulator import ComputeSegment, Transfer, simulate_overlap

FREE = Contention(lost_s_per_byte=0.0, slowdown=1.0)


def _transfer(seconds: float, after: int, contention: Contention = FREE) -> Transfer:
    return Transfer(seconds=seconds, num_bytes=100, after=after, contention=contention)


def test_what_ends_after_work_is_waited_for() -> None:
    work = [ComputeSegment(seconds=2.0), ComputeSegment(seconds=2.0)]
    # The first is ready at 2 and gone at 5, the second follows until 6; work ends at 4.
    simulated = simulate_overlap(work, [_transfer(3.0, 1), _transfer(1.0, 2)], wait_for_all=True)
    assert simulated.waited_s == pytest.approx(2.0)
    assert simulated.lost_s == 0
    assert simulate_overlap(work, [_transfer(3.0, 1)], wait_for_all=False).waited_s == 0


def test_work_waits_for_what_it_needs() -> None:
    work = [
        ComputeSegment(seconds=1.0),
        ComputeSegment(seconds=1.0, needs=1),
        ComputeSegment(seconds=1.0, needs=2),
    ]
    simulated = simulate_overlap(work, [_transfer(2.0, 0), _transfer(3.0, 1)], wait_for_all=False)
    # Until 2 for the first message, until 5 for the second.
    assert simulated.waited_s == pytest.approx(1.0 + 2.0)


def test_both_slow_each_other_while_both_go_on() -> None:
    # Beside work the message takes 4 instead of 2 and costs half of a second.
    contention = Contention(lost_s_per_byte=0.005, slowdown=2.0)
    simulated = simulate_overlap(
        [ComputeSegment(seconds=10.0)], [_transfer(2.0, 0, contention)], wait_for_all=True
    )
    assert simulated.lost_s == pytest.approx(0.5)
    assert simulated.waited_s == 0
    # Work of 1.75 ends after 2, when half of the message has gone; the rest goes alone.
    simulated = simulate_overlap(
        [ComputeSegment(seconds=1.75)], [_transfer(2.0, 0, contention)], wait_for_all=True
    )
    assert simulated.lost_s == pytest.approx(0.25)
    assert simulated.waited_s == pytest.approx(1.0)


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
    simulated = simulate_overlap(
        [ComputeSegment(seconds=seconds) for seconds in pieces], transfers, wait_for_all=True
    )
    assert simulated.lost_s + simulated.waited_s <= sum(messages) * (1 + 1e-9)


def test_lanes_that_wait_for_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="work 0 waits"):
        simulate_overlap(
            [ComputeSegment(seconds=1.0, needs=1)], [_transfer(1.0, 1)], wait_for_all=True
        )
