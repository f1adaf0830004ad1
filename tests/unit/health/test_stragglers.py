"""Tests of which ranks are named: those that are slower than the others, and those that stopped."""

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from paceline.health.stragglers import Stragglers, _bin_of, _has_outlier
from tests.unit.health.ranks import on_ranks

CPU = torch.device("cpu")
FILLED = 7
"""The step after which ranks have a time of their own."""
FOUND = FILLED + 2
"""The third step that shows a rank which was slow from the beginning."""


def _summed(*times: float) -> list[float]:
    bins = [0.0] * 96
    for seconds in times:
        bins[_bin_of(seconds)] += 1
    return bins


class _Steps:
    """Steps of ranks that agree on what is said, as a training step and its loop have them.

    Args:
        times: The own time of each rank, in each step.
        stopped: How long a rank was stopped, by rank and step.
        numbers: The number of each step.
    """

    def __init__(
        self,
        *times: Sequence[float],
        stopped: dict[tuple[int, int], float] | None = None,
        numbers: Sequence[int] | None = None,
    ) -> None:
        order = numbers or range(1, len(times[0]) + 1)
        self.said: dict[int, list[str]] = {}
        """What is said after each step, if anything."""
        self.exchanges: list[int] = []
        """Steps after which ranks exchanged their times."""

        def program(rank: int) -> list[list[str]]:
            stragglers, said = Stragglers(CPU), []
            for step, own_s in zip(order, times[rank], strict=True):
                notes = stragglers.notes(own_s, (stopped or {}).get((rank, step), 0.0))
                sums = torch.tensor(notes, dtype=torch.float64)
                dist.all_reduce(sums)
                stragglers.consider(sums.tolist())
                said.append(stragglers.find(step))
            return said

        (said, *others), messages = on_ranks(len(times), program)
        assert all(other == said for other in others)
        self.said = {step: lines for step, lines in zip(order, said, strict=True) if lines}
        place = -1
        for message in messages:
            if message.startswith("all-reduce"):
                place += 1
            elif order[place] not in self.exchanges:
                self.exchanges.append(order[place])


def test_an_outlier_is_seen_and_noise_is_not() -> None:
    assert _has_outlier(_summed(0.1, 0.15))
    assert _has_outlier(_summed(*[0.1] * 999, 0.14))
    assert not _has_outlier(_summed(0.1, 0.1))
    assert not _has_outlier(_summed(*[0.1, 0.102, 0.104] * 100))
    assert not _has_outlier([0.0] * 96)


def test_ranks_that_are_quicker_than_the_median_make_no_outlier() -> None:
    """Two fifths are twice as fast as the others, none of which is slower than the rest."""
    assert not _has_outlier(_summed(*[0.1] * 4, *[0.2] * 6))
    assert _has_outlier(_summed(*[0.1] * 6, *[0.2] * 4))


def test_times_beyond_the_bins_are_in_the_last_ones() -> None:
    assert (_bin_of(0.0), _bin_of(1e9)) == (0, 95)


def test_a_rank_says_that_it_was_stopped() -> None:
    stragglers = Stragglers(CPU)
    for _ in range(7):
        *bins, stopped = stragglers.notes(0.1, 0.0)
        assert not stopped
    assert sum(bins) == 1
    assert stragglers.notes(0.1, 4.8)[-1] == 1  # Stopped while it waited.
    assert stragglers.notes(5.1, 0.0)[-1] == 1  # Stopped while it computed.
    assert stragglers.notes(0.1, 0.0)[-1] == 0


def test_long_steps_are_no_stops() -> None:
    stragglers = Stragglers(CPU)
    assert all(stragglers.notes(30.0, 0.0)[-1] == 0 for _ in range(9))


def test_a_stop_of_a_second_is_too_short() -> None:
    stragglers = Stragglers(CPU)
    assert stragglers.notes(0.125, 1.0)[-1] == 0
    assert stragglers.notes(0.125 + 1.0, 0.0)[-1] == 0
    assert stragglers.notes(0.125, 1.01)[-1] == 1


def test_before_any_step_there_is_nothing_to_say() -> None:
    assert Stragglers(CPU).find(1) == []


def test_an_outlier_must_show_in_three_steps() -> None:
    """Without, ranks do not even exchange their times."""
    stragglers = Stragglers(CPU)
    for _ in range(2):
        stragglers.consider([*_summed(0.1, 0.2), 0.0])
        assert stragglers.find(1) == []
    stragglers.consider([*_summed(0.1, 0.1), 0.0])
    for _ in range(2):
        stragglers.consider([*_summed(0.1, 0.2), 0.0])
        assert stragglers.find(1) == []


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_the_slow_rank_is_named_when_all_have_looked_three_times(slow: int) -> None:
    times = [[0.25 if rank == slow else 0.1] * FOUND for rank in range(3)]
    steps = _Steps(*times)
    fastest = 1 if slow == 0 else 0
    assert steps.said == {
        FOUND: [
            f"rank {slow} takes 250 ms per step without waiting, 2.50 times the median 100 ms; "
            f"the fastest is rank {fastest} with 100 ms"
        ]
    }
    assert steps.exchanges == [FOUND]


def test_equal_ranks_exchange_nothing() -> None:
    steps = _Steps(*[[0.1] * 20] * 3)
    assert (steps.said, steps.exchanges) == ({}, [])


def test_a_rank_that_is_slow_now_and_then_is_not_named() -> None:
    """Its time is a median."""
    steps = _Steps([0.1] * 21, [0.3, 0.1, 0.1] * 7)
    assert (steps.said, steps.exchanges) == ({}, [])


def test_of_two_ranks_the_faster_one_is_the_usual() -> None:
    steps = _Steps([0.2] * FOUND, [0.1] * FOUND)
    assert steps.said[FOUND][0].startswith("rank 0 takes 200 ms per step without waiting, 2.00 ")


def test_only_slow_ranks_are_named() -> None:
    steps = _Steps(*[[own_s] * FOUND for own_s in (0.1, 0.1, 0.11, 0.3, 0.1, 0.4)])
    (lines,) = steps.said.values()
    assert [line.partition(" takes ")[0] for line in lines] == ["rank 3", "rank 5"]


def test_a_few_milliseconds_more_are_not_slow() -> None:
    """Steps of a millisecond have noise of the machine that is larger than they."""
    assert _Steps([0.001] * FOUND, [0.004] * FOUND).said == {}
    assert _Steps([0.001] * FOUND, [0.001 + 0.005] * FOUND).said == {}
    assert FOUND in _Steps([0.001] * FOUND, [0.0061] * FOUND).said


def test_a_rank_is_slow_above_1_3_times_the_median() -> None:
    assert _Steps([0.1] * FOUND, [1.3 * 0.1] * FOUND).said == {}
    assert FOUND in _Steps([0.1] * FOUND, [0.1301] * FOUND).said


def test_the_same_rank_is_not_named_again_for_a_hundred_steps() -> None:
    """Others may be, and the ranks look three times before each exchange."""
    numbers = [*range(1, FOUND + 4), *range(FOUND + 98, FOUND + 101)]
    steps = _Steps([0.1] * len(numbers), [0.2] * len(numbers), numbers=numbers)
    assert steps.exchanges == [FOUND, FOUND + 3, FOUND + 100]
    assert list(steps.said) == [FOUND, FOUND + 100]
    early = [*numbers[:-3], FOUND + 97, FOUND + 98, FOUND + 99]
    steps = _Steps([0.1] * len(early), [0.2] * len(early), numbers=early)
    assert steps.exchanges == [FOUND, FOUND + 3, FOUND + 99]
    assert list(steps.said) == [FOUND]


def test_another_rank_may_be_named_in_the_meantime() -> None:
    steps = _Steps([0.1] * 20, [0.2] * 20, [0.1] * 8 + [0.4] * 12)
    assert [line.partition(" takes ")[0] for lines in steps.said.values() for line in lines] == [
        "rank 1",
        "rank 2",
    ]


def test_a_rank_that_was_stopped_is_named_at_once() -> None:
    steps = _Steps([0.1] * 4, [0.1] * 4, [0.1] * 4, stopped={(1, 2): 4.5, (2, 2): 1.0})
    assert steps.said == {2: ["rank 1 was stopped for 4.5 s"]}
    assert steps.exchanges == [2]


def test_all_ranks_that_were_stopped_are_named() -> None:
    steps = _Steps([0.1] * 3, [0.1] * 3, [0.1] * 3, stopped={(0, 3): 2.0, (2, 3): 3.0})
    assert steps.said == {3: ["rank 0 was stopped for 2 s", "rank 2 was stopped for 3 s"]}


def test_a_stop_in_the_middle_of_work_is_told_by_its_excess() -> None:
    steps = _Steps([0.1] * 3, [0.1, 3.1, 0.1])
    assert steps.said == {2: ["rank 1 was stopped for 3 s"]}


def test_while_a_rank_was_stopped_nobody_is_called_slow() -> None:
    """The times of that step say nothing; the slow one is named after three further looks."""
    steps = _Steps([0.1] * (FOUND + 3), [0.2] * (FOUND + 3), stopped={(0, FOUND): 2.0})
    assert steps.said[FOUND] == ["rank 0 was stopped for 2 s"]
    assert list(steps.said) == [FOUND, FOUND + 3]
    assert steps.said[FOUND + 3][0].startswith("rank 1 takes 200 ms")
