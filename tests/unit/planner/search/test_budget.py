"""Tests of the fewest and the cheapest devices for a budget."""

import pytest

from paceline.accounting import flops_per_token
from paceline.core import UsageError, model_preset
from paceline.planner.search.budget import device_counts, plan_budget
from tests.unit.planner.search.search_cases import H100, PERFORMANCE, spec

ASKED = spec(
    shape=model_preset("llama3-8B"),
    context_length=8192,
    global_batch=512,
    memory_bytes=80e9,
    devices_per_host=8,
)
PEAK = H100.peak("bfloat16").value


def test_the_smallest_and_the_cheapest_make_the_deadline() -> None:
    found = plan_budget(
        ASKED, PERFORMANCE, flops=1e22, deadline_days=10.0, peak_flops=PEAK, price=2.0
    )
    assert found.tokens == pytest.approx(1e22 / flops_per_token(ASKED.shape, 8192).model)
    in_time = [point for point in found.points if point.in_time]
    assert found.smallest.devices == min(point.devices for point in in_time)
    assert found.cheapest.run.device_hours == min(point.run.device_hours for point in in_time)
    for point in found.points:
        assert point.in_time == (point.run.days <= 10)
        # No run is faster than the peak allows.
        assert point.run.days * 86_400 * PEAK * point.devices >= 1e22
        assert point.run.interruptions > 0
        assert point.run.checkpoint_interval_s > 0


def test_a_deadline_that_nothing_makes_is_told_with_the_fastest() -> None:
    with pytest.raises(UsageError, match=r"the fastest of \d+ that were tried"):
        plan_budget(ASKED, PERFORMANCE, flops=1e24, deadline_days=0.5, peak_flops=PEAK)


def test_a_batch_that_nothing_divides_is_told() -> None:
    one = spec(shape=model_preset("llama3-8B"), context_length=1, global_batch=1)
    with pytest.raises(UsageError, match="larger --batch-tokens"):
        plan_budget(one, PERFORMANCE, flops=1e25, deadline_days=1.0, peak_flops=PEAK)


def test_numbers_of_devices_begin_at_the_peak() -> None:
    counts = device_counts(100.0, 8)
    assert counts[0] >= 100
    assert counts[-1] <= 1600
    assert {112, 128, 160, 192, 1024, 1536} <= set(counts)
    assert device_counts(0.5, 8) == [8]
