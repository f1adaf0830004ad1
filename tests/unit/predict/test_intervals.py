"""Tests of intervals against textbook formulas, and of the accuracy of predictions."""

import math

import numpy as np
import pytest

from paceline.core.plan import Estimate
from paceline.predict.intervals import (
    PredictionOutcome,
    accuracy,
    conformal_quantile,
    weighted_quantile,
)


@pytest.mark.parametrize("size", [9, 10, 19, 20, 99, 250])
def test_the_rank_is_that_of_split_conformal_prediction(size: int) -> None:
    errors = np.random.default_rng(size).permutation(np.arange(1.0, size + 1))
    # Lei et al. 2018: the k-th smallest of n errors, k = ceil((n + 1) (1 - alpha)), alpha = 1/10.
    assert conformal_quantile(errors) == -(-9 * (size + 1) // 10)


@pytest.mark.parametrize("size", [1, 3, 8])
def test_few_errors_widen_the_interval(size: int) -> None:
    rank = math.ceil(0.9 * (size + 1))
    assert rank > size
    assert conformal_quantile(np.linspace(0.1, 0.3, size)[::-1]) == pytest.approx(
        (0.1 if size == 1 else 0.3) * rank / size
    )


def test_intervals_cover_what_they_promise() -> None:
    random = np.random.default_rng(0)
    inside = [
        errors[-1] <= conformal_quantile(errors[:-1])
        for errors in random.exponential(size=(4000, 30))
    ]
    # P(inside) = 27 / 30 for 29 earlier errors.
    assert np.mean(inside) == pytest.approx(0.9, abs=0.015)


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
def test_equal_weights_give_the_quantile_of_the_inverse_distribution(fraction: float) -> None:
    values = np.random.default_rng(1).normal(size=37)
    expected = np.quantile(values, fraction, method="inverted_cdf")
    assert weighted_quantile(values, np.ones(37), fraction) == expected


def test_a_weight_counts_like_repetitions() -> None:
    values, weights = np.array([3.0, 1.0, 2.0]), np.array([1.0, 2.0, 4.0])
    repeated = np.repeat(values, weights.astype(int))
    for fraction in (0.2, 0.5, 0.8, 0.9):
        expected = np.quantile(repeated, fraction, method="inverted_cdf")
        assert weighted_quantile(values, weights, fraction) == expected


def test_accuracy_counts_predictions_and_intervals() -> None:
    found = accuracy(
        [
            PredictionOutcome(predicted=Estimate(value=1.1, low=0.9, high=1.3), measured=1.0),
            PredictionOutcome(predicted=Estimate(value=0.5, low=0.4, high=0.6), measured=1.0),
            PredictionOutcome(predicted=Estimate(value=0.8), measured=1.0),
            PredictionOutcome(predicted=None, measured=1.0),
        ]
    )
    assert (found.num_predicted, found.num_intervals, found.num_inside) == (3, 2, 1)
    assert (found.coverage, found.median_width) == (0.5, pytest.approx((0.2 / 1.1 + 0.2) / 2))
    assert found.median_error == pytest.approx(0.2)
    assert found.largest_error == pytest.approx(0.5)
    alone = accuracy([PredictionOutcome(predicted=Estimate(value=1.0), measured=1.0)])
    assert (alone.coverage, alone.median_width) == (None, None)
