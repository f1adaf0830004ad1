"""Tests that intervals have their nominal coverage, and that departures cause warnings."""

import pytest

from paceline.scaling.synthetic import Departure
from studies.scaling.coverage import coverage_study, warning_study


def test_coverage_of_a_few_sweeps() -> None:
    seen = []
    studied = coverage_study(num_sweeps=40, num_draws=100, noise=0.005, on_progress=seen.append)
    by_method = {coverage.method: coverage for coverage in studied}
    assert set(by_method) == {"parametric", "parabola", "lowest_run"}
    # Forty sweeps distinguish a 90% interval from a 60% one, but not from an 85% one.
    assert by_method["parametric"].covered > 0.75
    assert by_method["parametric"].deviation < by_method["lowest_run"].deviation
    assert seen[-1] == 40


@pytest.mark.slow
def test_coverage() -> None:
    studied = coverage_study(num_sweeps=500, num_draws=200, noise=0.005)
    (parametric,) = [coverage for coverage in studied if coverage.method == "parametric"]
    assert 0.85 <= parametric.covered <= 0.95


@pytest.mark.slow
@pytest.mark.parametrize(
    "departure",
    [Departure(drift=0.2), Departure(untuned_learning_rate=0.005)],
    ids=["drifting optimum", "untuned learning rate"],
)
def test_departures_are_warned_of(departure: Departure) -> None:
    warned, _bias = warning_study(num_sweeps=100, noise=0.005, departure=departure)
    assert warned >= 0.9


def test_a_departure_that_biases_the_answer_is_warned_of() -> None:
    departure = Departure(untuned_learning_rate=0.005)
    warned, bias = warning_study(num_sweeps=5, noise=0.003, departure=departure)
    assert warned == 1
    assert bias < -0.5
