"""Rates of shapes that were timed and of those between, and calibrations out of records."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.accounting.calibration import Timed, linear_work, nearest_times
from paceline.accounting.calibration_records import calibrations
from paceline.core import UsageError
from paceline.records import Metric, Record, capture_environment

PLACE: dict[str, Any] = {
    "world_size": 2,
    "num_hosts": 1,
    "backend": "gloo",
    "device": "cpu",
    "hardware": "made up",
    "threads": 1,
    "dtype": "float32",
}
ENVIRONMENT = capture_environment()
DIMENSIONS = st.tuples(*[st.integers(1, 4096)] * 3)


def _timed(dimensions: tuple[int, ...], rate: float) -> Timed:
    work = linear_work(dimensions)
    return Timed(
        dimensions=dimensions, work=work, forward_s=rate * work, backward_s=2 * rate * work
    )


def _record(quantity: str, seconds: float = 1e-3, **fields: Any) -> Record:
    names = {
        "linear": ("forward_time_s", "backward_time_s"),
        "attention": ("forward_time_s", "backward_time_s"),
        "call": ("forward_time_s", "backward_time_s"),
        "contention": ("lost_s_per_byte", "slowdown"),
        "collective": ("latency_s", "algorithm_bandwidth_bytes_per_s", "max_relative_error"),
    }.get(quantity, ("element_time_s",))
    return Record(
        kind="calibration",
        case={"quantity": quantity, **PLACE, "float32_matmul_precision": "highest", **fields},
        environment=ENVIRONMENT,
        metrics={name: Metric(value=seconds) for name in names},
        outcome="ok",
    )


def _records(**place: Any) -> list[Record]:
    heads = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 8}
    return [
        _record("linear", tokens=64, inputs=16, outputs=16, **place),
        _record("attention", batch=1, context=64, **heads, attention="sdpa", **place),
        *(_record(quantity, **place) for quantity in ("stream", "copy", "call", "optimizer")),
        _record("collective", operation="all_reduce", smallest_bytes=1, largest_bytes=10, **place),
        _record("contention", operation="all_reduce", size_bytes=4, **place),
    ]


@given(DIMENSIONS, st.floats(1e-12, 1e-9))
def test_a_shape_that_was_timed_takes_what_it_took(
    dimensions: tuple[int, ...], rate: float
) -> None:
    work = linear_work(dimensions)
    timed = [_timed(dimensions, rate), _timed((dimensions[0] + 1, *dimensions[1:]), 7 * rate)]
    assert nearest_times(timed, dimensions, work) == (rate * work, 2 * rate * work)


@given(st.lists(st.tuples(DIMENSIONS, st.floats(1e-12, 1e-9)), min_size=1), DIMENSIONS)
def test_another_shape_has_a_rate_between_its_neighbours(
    measured: list[tuple[tuple[int, ...], float]], dimensions: tuple[int, ...]
) -> None:
    work = linear_work(dimensions)
    forward_s, backward_s = nearest_times(
        [_timed(shape, rate) for shape, rate in measured], dimensions, work
    )
    rates = [rate for _, rate in measured]
    assert min(rates) * (1 - 1e-9) <= forward_s / work <= max(rates) * (1 + 1e-9)
    assert math.isclose(backward_s, 2 * forward_s)


def test_each_place_has_its_own() -> None:
    made = calibrations([*_records(), *_records(link_rate_bits_per_s=1e9)])
    assert [entry.place["link_rate_bits_per_s"] for entry in made] == [None, 1e9]
    assert made[0].world_size == 2
    assert made[0].collective("all_reduce").segments[0].largest_bytes == 10
    assert made[0].contention("all_reduce").slowdown == 1  # Never faster than alone.


def test_the_last_of_a_place_counts() -> None:
    again = [_record("linear", 9e-3, tokens=64, inputs=16, outputs=16), *_records()[1:]]
    (made,) = calibrations([*_records(), *again])
    assert [timed.forward_s for timed in made.linears] == [9e-3]
    assert len(made.collective("all_reduce").segments) == 1


def test_an_interrupted_one_is_refused() -> None:
    with pytest.raises(UsageError, match="lacks 'optimizer'; run paceline calibrate again"):
        calibrations(_records()[:5])


def test_an_operation_that_was_not_measured_is_named() -> None:
    (made,) = calibrations(_records())
    with pytest.raises(UsageError, match="holds no gather_from_owners"):
        made.collective("gather_from_owners")
