"""Tests of intervals against textbook formulas, by counting and by known distributions."""

import math

import numpy as np
import pytest

from paceline.accounting.intervals import (
    NORMAL_90,
    bootstrap_medians,
    conformal_quantile,
    weighted_quantile,
)


@pytest.mark.parametrize("size", [9, 10, 19, 100])
def test_the_conformal_quantile_is_the_rank_of_the_textbook(size: int) -> None:
    errors = np.random.default_rng(size).permutation(np.arange(1.0, size + 1))
    assert conformal_quantile(errors) == math.ceil(0.9 * (size + 1))
    assert conformal_quantile(errors.tolist(), coverage=0.5) == math.ceil(0.5 * (size + 1))


def test_a_rank_beyond_the_last_error_stretches_the_largest() -> None:
    assert conformal_quantile([1.0, 2.0]) == 2.0 * 3 / 2
    assert conformal_quantile([0.5]) == 1.0
    with pytest.raises(ValueError, match="at least one error"):
        conformal_quantile([])


def test_the_next_error_is_inside_as_often_as_promised() -> None:
    # With 19 exchangeable errors, the 18th smallest of 20 is exceeded twice in 20 times.
    draws = np.random.default_rng(0).exponential(size=(4000, 20))
    inside = [row[-1] <= conformal_quantile(row[:-1]) for row in draws]
    assert np.mean(inside) == pytest.approx(18 / 20, abs=0.015)


def test_bootstrap_medians_spread_like_the_median_of_a_normal() -> None:
    generator = np.random.default_rng(1)
    samples = generator.standard_normal(2001)
    medians = bootstrap_medians(samples, 2000, generator)
    # The median of n normal samples has a standard deviation of sqrt(pi / 2n).
    assert medians.std() == pytest.approx(math.sqrt(math.pi / 2 / len(samples)), rel=0.2)
    assert medians.mean() == pytest.approx(float(np.median(samples)), abs=0.01)


def test_rows_are_drawn_together() -> None:
    first = np.random.default_rng(2).standard_normal(15)
    pairs = bootstrap_medians(np.array([first, 3 * first]), 50, np.random.default_rng(3))
    assert pairs.shape == (2, 50)
    np.testing.assert_allclose(pairs[1], 3 * pairs[0])


def test_nine_in_ten_normal_numbers_are_within_the_normal_quantile() -> None:
    assert math.erf(NORMAL_90 / math.sqrt(2)) == pytest.approx(0.9, abs=1e-3)


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
