"""Tests of when fragments are sent and applied, and of how parameters are divided among them."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import UsageError
from paceline.core.outer import OuterSettings, default_update
from paceline.parallel.outer.schedule import Schedule, divide


@st.composite
def _settings(draw: st.DrawFn) -> OuterSettings:
    every_steps = draw(st.integers(1, 60))
    fragments = draw(st.integers(1, every_steps))
    delay_steps = draw(st.integers(0, every_steps // fragments - 1))
    return OuterSettings(every_steps=every_steps, fragments=fragments, delay_steps=delay_steps)


@given(_settings())
def test_a_round_sends_each_fragment_once_and_one_is_in_flight(settings: OuterSettings) -> None:
    schedule = Schedule(settings)
    in_flight = None
    sent: list[tuple[int, int]] = []
    for step in range(1, 4 * settings.every_steps + 1):
        if schedule.applied(step) is not None and settings.delay_steps:
            assert schedule.applied(step) == in_flight
            in_flight = None
        if (fragment := schedule.sent(step)) is not None:
            assert in_flight is None
            in_flight = fragment if settings.delay_steps else None
            sent.append((step, fragment))
    assert [fragment for _, fragment in sent] == 4 * [*range(settings.fragments)]
    by_fragment = [[step for step, each in sent if each == f] for f in range(settings.fragments)]
    for steps in by_fragment:
        assert {later - step for step, later in itertools.pairwise(steps)} == {settings.every_steps}
    assert by_fragment[-1][0] == settings.every_steps
    distances = {later - step for (step, _), (later, _) in itertools.pairwise(sent)}
    assert min(distances) == settings.spacing_steps
    assert max(distances) <= settings.spacing_steps + 1


def test_a_blocking_round_applies_what_it_sends() -> None:
    schedule = Schedule(OuterSettings(every_steps=4))
    assert [schedule.sent(step) for step in range(1, 9)] == [None, None, None, 0] * 2
    assert [schedule.applied(step) for step in range(1, 9)] == [None, None, None, 0] * 2


@given(st.lists(st.integers(0, 40), min_size=1, max_size=9), st.data())
def test_the_largest_part_is_as_small_as_any_division_has_it(
    sizes: list[int], data: st.DataObject
) -> None:
    num_parts = data.draw(st.integers(1, len(sizes)))
    parts = divide(sizes, num_parts)
    assert len(parts) == num_parts
    assert [index for part in parts for index in part] == [*range(len(sizes))]
    assert all(parts)

    def largest(cuts: tuple[int, ...]) -> int:
        pairs = itertools.pairwise([0, *cuts, len(sizes)])
        return max(sum(sizes[begin:end]) for begin, end in pairs)

    best = min(map(largest, itertools.combinations(range(1, len(sizes)), num_parts - 1)))
    assert max(sum(sizes[index] for index in part) for part in parts) == best


def test_more_fragments_than_parameters_are_refused() -> None:
    with pytest.raises(UsageError, match="fragments 3 are more than the 2 trained parameters"):
        divide([1, 2], 3)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"every_steps": 0}, "every_steps 0 must be 1 or more"),
        ({"every_steps": 4, "fragments": 5}, "at most one is sent in a step"),
        ({"every_steps": 4, "fragments": 0}, "fragments 0 must be between 1 and every_steps 4"),
        (
            {"every_steps": 30, "fragments": 4, "delay_steps": 7},
            "delay_steps 7 must be less than the 7 steps between two fragments",
        ),
        ({"every_steps": 4, "delay_steps": -1}, "delay_steps -1 must be less"),
        ({"every_steps": 4, "learning_rate": 0.0}, "learning_rate 0.0 must be positive"),
        ({"every_steps": 4, "learning_rate": float("inf")}, "must be positive"),
        ({"every_steps": 4, "momentum": 1.0}, "momentum 1.0 must be at least 0 and less than 1"),
        ({"every_steps": 4, "compression": "int2"}, "'int2' is none of 'none', 'bf16', 'int8'"),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        OuterSettings(**wrong)  # type: ignore[arg-type]


def test_short_runs_take_the_plain_mean_and_long_runs_what_is_published() -> None:
    assert default_update(99) == (1.0, 0.0)
    assert default_update(100) == (0.7, 0.9)


def test_the_state_of_a_number_in_bytes() -> None:
    def of(num_sites: int, **settings: object) -> float:
        return OuterSettings(every_steps=1, **settings).state_bytes(num_sites)  # type: ignore[arg-type]

    assert of(2, compression="none") == 4
    assert of(2, compression="bf16", momentum=0.9) == 8
    assert of(4, compression="int4", momentum=0.9) == 13
    assert of(2, compression="int8") == 10
