"""Tests of rates for timed and intermediate shapes, and of calibrations read from records."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core import UsageError
from paceline.predict.calibration import Timed, calibrations, linear_work, nearest_times
from paceline.records.kinds import LINK_RATE
from tests.unit.predict.calibration_cases import ENVIRONMENT, make_record, make_records

DIMENSIONS = st.tuples(*[st.integers(1, 4096)] * 3)


def _timed(dimensions: tuple[int, ...], rate: float) -> Timed:
    work = linear_work(dimensions)
    return Timed(dimensions=dimensions, forward_s=rate * work, backward_s=2 * rate * work)


@given(DIMENSIONS, st.floats(1e-12, 1e-9))
def test_a_shape_that_was_timed_takes_what_it_took(
    dimensions: tuple[int, ...], rate: float
) -> None:
    work = linear_work(dimensions)
    timed = [_timed(dimensions, rate), _timed((dimensions[0] + 1, *dimensions[1:]), 7 * rate)]
    assert nearest_times(timed, dimensions, linear_work) == (rate * work, 2 * rate * work)


NEAR = st.tuples(*[st.integers(100, 200)] * 3)


@given(st.lists(st.tuples(NEAR, st.floats(1e-12, 1e-9)), min_size=1), NEAR)
def test_another_shape_has_a_rate_between_its_neighbours(
    measured: list[tuple[tuple[int, ...], float]], dimensions: tuple[int, ...]
) -> None:
    work = linear_work(dimensions)
    forward_s, backward_s = nearest_times(
        [_timed(shape, rate) for shape, rate in measured], dimensions, linear_work
    )
    rates = [rate for _, rate in measured]
    assert min(rates) * (1 - 1e-9) <= forward_s / work <= max(rates) * (1 + 1e-9)
    assert math.isclose(backward_s, 2 * forward_s)


def test_each_topology_has_its_own() -> None:
    made = calibrations([*make_records(), *make_records(link_rate_bits_per_s=1e9)])
    assert [entry.topology["link_rate_bits_per_s"] for entry in made] == [None, 1e9]
    assert made[0].world_size == 2
    assert made[0].collective("all_reduce").segments[0].largest_bytes == 10
    assert made[0].contention("all_reduce").slowdown == 1  # Never below 1.


def test_models_of_one_place_add_up() -> None:
    other = [make_record("linear", 9e-3, tokens=64, inputs=32, outputs=16), *make_records()[1:]]
    (made,) = calibrations([*make_records(), *other])
    assert [timed.dimensions for timed in made.linears] == [(64, 16, 16), (64, 32, 16)]
    assert len(made.collective("all_reduce").segments) == 1


def test_the_last_of_a_place_counts() -> None:
    again = [make_record("linear", 9e-3, tokens=64, inputs=16, outputs=16), *make_records()[1:]]
    (made,) = calibrations([*make_records(), *again])
    assert [timed.forward_s for timed in made.linears] == [9e-3]
    assert len(made.collective("all_reduce").segments) == 1


def test_an_interrupted_one_is_refused() -> None:
    with pytest.raises(UsageError, match="lacks 'optimizer'; run paceline calibrate again"):
        calibrations(make_records()[:5])


def test_a_shape_unlike_all_that_were_timed_is_refused() -> None:
    timed = [_timed((128, 256, 256), 1e-11)]
    with pytest.raises(UsageError, match="128 x 8192 x 256 was not calibrated"):
        nearest_times(timed, (128, 8192, 256), linear_work)


def test_an_interrupted_run_does_not_spoil_the_next() -> None:
    (made,) = calibrations([*make_records()[:3], *make_records()])
    assert made.optimizer_s_per_parameter == 1e-3


def test_an_operation_that_was_not_measured_is_named() -> None:
    (made,) = calibrations(make_records())
    with pytest.raises(UsageError, match="has no gather_from_owners"):
        made.collective("gather_from_owners")


def test_the_engine_is_read_where_it_was_timed() -> None:
    (without,) = calibrations(make_records())
    assert without.engine == {}
    timed = [make_record("engine", 2e-3, engine=name) for name in ("plain", "tensor")]
    (calibration,) = calibrations([*make_records(), *timed])
    assert calibration.engine == {"plain": 2e-3, "tensor": 2e-3}


@pytest.mark.parametrize(
    ("place", "machines"),
    [
        ({"num_hosts": 1}, 1),
        ({"num_hosts": 2}, 2),
        # Lab hosts are namespaces of one machine.
        ({"num_hosts": 2, LINK_RATE: 1e9}, 1),
    ],
)
def test_ranks_share_the_processors_of_their_machine(
    place: dict[str, object], machines: int
) -> None:
    processors = ENVIRONMENT.num_processors
    ranks = 6 * processors
    (calibration,) = calibrations(make_records(world_size=ranks, **place))
    assert calibration.oversubscription == 6 / machines
    (few,) = calibrations(make_records(world_size=1))
    assert few.oversubscription == 1
