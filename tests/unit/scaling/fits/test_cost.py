"""Tests of the time and memory of parametric fits."""

import time

import numpy as np
import pytest
from scipy.optimize import least_squares

from paceline.scaling import LossSurface, SweepDesign, synthetic_sweep
from paceline.scaling.fits.parametric import KNEE, fit_huber, fit_parametric
from paceline.scaling.sweep import draw_counts


@pytest.mark.slow
def test_speed(surface: LossSurface) -> None:
    """Checks generous bounds on CPU time; docs/scaling-laws.md has measured times."""
    sweep = synthetic_sweep(surface, noise=0.005)
    fit_parametric(sweep, np.ones((1, len(sweep))))
    began = time.process_time()
    fit_parametric(sweep, np.ones((1, len(sweep))))
    assert time.process_time() - began < 0.5
    began = time.process_time()
    fit_parametric(sweep, draw_counts(sweep, 1000))
    assert time.process_time() - began < 10


def test_ten_thousand_runs_in_linear_memory(surface: LossSurface) -> None:
    import tracemalloc

    def peak(num_budgets: int) -> int:
        budgets = tuple(np.geomspace(1e18, 1e21, num_budgets))
        sweep = synthetic_sweep(surface, SweepDesign(budgets=budgets, num_sizes=10), noise=0.005)
        counts = draw_counts(sweep, 20)
        tracemalloc.start()
        fit_parametric(sweep, counts)
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    small, large = peak(100), peak(1000)
    assert large < 12 * small
    assert large < 300e6


@pytest.mark.slow
def test_a_batch_of_replicates_is_faster_than_scipy_and_ends_where_it_does(
    surface: LossSurface,
) -> None:
    """The docstring of `least_squares` has measured times; the bound here is a generous one."""
    sweep = synthetic_sweep(surface, noise=0.005)
    num_ours, num_scipys = 400, 40
    counts = draw_counts(sweep, num_ours)
    began = time.process_time()
    ours = fit_huber(sweep, counts)
    ours_s = (time.process_time() - began) / num_ours
    centres = np.log(sweep.parameters).mean(), np.log(sweep.tokens).mean()
    best = ours.surface
    start = np.array(
        [
            np.log(best.irreducible),
            np.log(best.parameter_scale) - best.parameter_exponent * centres[0],
            best.parameter_exponent,
            np.log(best.token_scale) - best.token_exponent * centres[1],
            best.token_exponent,
        ]
    )
    objectives = []
    began = time.process_time()
    for row in counts[:num_scipys]:
        # A run counts as often as it was drawn; scipy's Huber loss has no weights.
        drawn = np.repeat(np.arange(len(sweep)), row.astype(int))
        log_n = np.log(sweep.parameters[drawn]) - centres[0]
        log_d = np.log(sweep.tokens[drawn]) - centres[1]
        log_loss = np.log(sweep.loss[drawn])

        def terms(
            theta: np.ndarray, log_n: np.ndarray = log_n, log_d: np.ndarray = log_d
        ) -> np.ndarray:
            floor = np.full_like(log_n, theta[0])
            return np.stack([floor, theta[1] - theta[2] * log_n, theta[3] - theta[4] * log_d])

        def residuals(theta: np.ndarray, log_loss: np.ndarray = log_loss) -> np.ndarray:
            return np.logaddexp.reduce(terms(theta)) - log_loss

        def slopes(
            theta: np.ndarray, log_n: np.ndarray = log_n, log_d: np.ndarray = log_d
        ) -> np.ndarray:
            parts = terms(theta)
            of_e, of_n, of_d = np.exp(parts - np.logaddexp.reduce(parts))
            return np.stack([of_e, of_n, -of_n * log_n, of_d, -of_d * log_d], axis=1)

        found = least_squares(
            residuals, start, jac=slopes, loss="huber", f_scale=KNEE, xtol=1e-9, ftol=1e-10
        )
        objectives.append(found.cost)
    scipys_s = (time.process_time() - began) / num_scipys
    np.testing.assert_allclose(ours.replicates.squares[:num_scipys], objectives, rtol=1e-4)
    assert scipys_s > 3 * ours_s
