"""Times are told apart by their samples, and by nothing else."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import quantile_test

from paceline.records import Metric
from paceline.reports.evidence.comparison import Ratio, compare, median_interval, stands_out

STEADY = (1.0, 0.999, 1.001, 1.0, 1.0, 1.0, 1.0)
NOISY = (0.8, 1.3, 1.0, 0.7, 1.1, 0.9, 1.2)


def _metric(seconds: float, spread: Sequence[float]) -> Metric:
    return Metric.from_samples([seconds * factor for factor in spread])


def _compare(subject: Metric, baseline: Metric, *, in_turn: bool = False) -> Ratio:
    found = compare(subject, baseline, in_turn=in_turn)
    assert found is not None
    return found


@settings(deadline=None)
@given(st.lists(st.floats(0.001, 1000.0), min_size=6, max_size=300))
def test_the_interval_is_that_of_the_quantile_test(values: list[float]) -> None:
    expected = quantile_test(values, p=0.5).confidence_interval(confidence_level=0.95)
    assert median_interval(values) == (expected.low, expected.high)


@pytest.mark.parametrize(
    ("spread", "ratio", "standing"),
    [
        (STEADY, 0.98, "less"),
        (STEADY, 1.02, "more"),
        (NOISY, 0.98, "alike"),
        (STEADY[:6], 0.5, "less"),
        (STEADY[:5], 0.5, "unknown"),
        ((1.0,), 0.5, "unknown"),
    ],
)
def test_a_ratio_is_judged_by_its_rounds(
    spread: Sequence[float], ratio: float, standing: str
) -> None:
    base = Metric.from_samples([1.0] * len(spread))
    found = _compare(_metric(ratio, spread), base, in_turn=True)
    assert found.standing == standing
    assert found.value == pytest.approx(ratio)


def test_rounds_that_were_slow_for_both_do_not_hide_a_difference() -> None:
    slow, base = _metric(1.03, NOISY), _metric(1.0, NOISY)
    assert _compare(slow, base, in_turn=True).standing == "more"
    assert _compare(slow, base).standing == "alike"


@pytest.mark.parametrize(
    ("subject", "standing"), [(1.03, "alike"), (0.97, "alike"), (1.2, "more"), (0.8, "less")]
)
def test_runs_one_after_the_other_may_drift(subject: float, standing: str) -> None:
    metric = _metric(subject, STEADY)
    assert _compare(metric, _metric(1.0, STEADY)).standing == standing
    # Samples in other numbers were not taken in turn, whatever is said of them.
    assert _compare(metric, _metric(1.0, STEADY[:6]), in_turn=True).standing == standing


@pytest.mark.parametrize("in_turn", [True, False])
@pytest.mark.parametrize("base", [Metric(value=0.0), Metric(value=1.0, samples=(0.0, 1.0, 2.0))])
def test_nothing_is_divided_by_zero(base: Metric, in_turn: bool) -> None:
    assert compare(Metric(value=1.0, samples=(1.0,) * 3), base, in_turn=in_turn) is None


@pytest.mark.parametrize(("value", "expected"), [(1.25, False), (1.31, True), (0.69, True)])
def test_one_more_sample_stands_out_beyond_all_others(value: float, expected: bool) -> None:
    assert stands_out(value, _metric(1.0, NOISY)) is expected
    assert stands_out(value, _metric(1.0, NOISY[:5])) is None
