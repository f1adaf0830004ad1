"""Tests that the run to measure next is the one that says most about what is asked."""

import numpy as np
import pytest

from paceline.planner.calibrations.next_run import choose_runs, deviations_of, measured_covariance

COVARIANCE = np.diag([0.3**2, 0.1**2])


def test_the_run_that_depends_on_what_is_uncertain_comes_first() -> None:
    candidates = np.array([[0.0, 1.0], [1.0, 0.0], [0.5, 0.5]])
    assert choose_runs(candidates, COVARIANCE, 1, asked=np.array([[1.0, 0.2]])) == [1]
    assert choose_runs(candidates, COVARIANCE, 1, asked=np.array([[0.0, 1.0]])) == [0]


def test_no_run_is_chosen_twice() -> None:
    candidates = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    chosen = choose_runs(candidates, COVARIANCE, 5)
    assert sorted(chosen) == [0, 1, 2]
    assert chosen[1] == 2  # Measuring the same again says less.


def test_measuring_narrows_as_a_regression_would() -> None:
    slopes = np.array([[1.0, 0.5], [0.2, 1.0]])
    left = measured_covariance(slopes, COVARIANCE)
    exact = np.linalg.inv(np.linalg.inv(COVARIANCE) + slopes.T @ slopes / 0.05**2)
    assert left == pytest.approx(exact)
    assert np.all(deviations_of(slopes, left) < deviations_of(slopes, COVARIANCE))
