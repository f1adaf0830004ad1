"""Tests that times are distinguished by their samples only."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import quantile_test

from paceline.records import Metric
from paceline.reports.evidence.comparison import compare, median_interval
from tests.unit.course.report_cases import NOISY, STEADY


def _metric(seconds: float, spread: Any) -> Metric:
    return Metric.from_samples([seconds * factor for factor in spread])


@settings(deadline=None)
@given(st.lists(st.floats(0.001, 1000.0), min_size=6, max_size=300))
def test_the_interval_is_that_of_the_quantile_test(values: list[float]) -> None:
    expected = quantile_test(values, p=0.5).confidence_interval(confidence_level=0.95)
    assert median_interval(values) == (expected.low, expected.high)


@pytest.mark.parametrize("in_turn", [True, False])
@pytest.mark.parametrize(
    ("ratio", "spread", "base", "by_rounds", "by_runs"),
    [
        (0.98, STEADY, (1.0,) * 7, "less", "alike"),
        (1.03, STEADY, STEADY, "more", "alike"),
        (0.98, NOISY, (1.0,) * 7, "alike", "alike"),
        # Rounds that are slow for both do not hide a difference.
        (1.03, NOISY, NOISY, "more", "alike"),
        # Consecutive runs may drift.
        (1.2, STEADY, STEADY, "more", "more"),
        (0.8, STEADY, STEADY, "less", "less"),
        # Different numbers of samples were not taken in turn, regardless of `in_turn`.
        (0.97, STEADY, STEADY[:6], "alike", "alike"),
        (1.2, STEADY, STEADY[:6], "more", "more"),
        (0.5, STEADY[:6], STEADY[:6], "less", "less"),
        (0.5, STEADY[:5], STEADY[:5], "unknown", "unknown"),
        (0.5, (1.0,), (1.0,), "unknown", "unknown"),
    ],
)
def test_a_ratio_is_judged_by_its_rounds_or_runs(
    ratio: float, spread: Any, base: Any, by_rounds: str, by_runs: str, in_turn: bool
) -> None:
    found = compare(_metric(ratio, spread), _metric(1.0, base), in_turn=in_turn)
    assert found is not None
    assert found.standing == (by_rounds if in_turn else by_runs)
    assert found.value == pytest.approx(ratio)


@pytest.mark.parametrize("in_turn", [True, False])
@pytest.mark.parametrize("base", [Metric(value=0.0), Metric(value=1.0, samples=(0.0, 1.0, 2.0))])
def test_nothing_is_divided_by_zero(base: Metric, in_turn: bool) -> None:
    assert compare(Metric(value=1.0, samples=(1.0,) * 3), base, in_turn=in_turn) is None
