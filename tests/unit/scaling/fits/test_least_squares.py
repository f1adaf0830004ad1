"""Tests of the batched optimiser against scipy's, row by row."""

import itertools

import numpy as np
import pytest
from scipy.optimize import least_squares

from paceline.scaling.fits.least_squares import Linearization, Minimum, Rows, minimize

TIMES = np.linspace(0.0, 3.0, 12)
WIDE = (-np.inf, np.inf)


def decays(generator: np.random.Generator, number: int) -> np.ndarray:
    """Returns noisy decays a exp(-b t), one per row."""
    heights, rates = generator.uniform(0.5, 3.0, number), generator.uniform(0.2, 2.0, number)
    clean = heights[:, None] * np.exp(-rates[:, None] * TIMES)
    return clean + 0.05 * generator.standard_normal(clean.shape)


def fit_decays(
    observed: np.ndarray, start: np.ndarray, weights: np.ndarray | None = None, **options: object
) -> Minimum:
    given = np.ones_like(observed) if weights is None else weights

    def linearize(theta: np.ndarray, rows: Rows) -> Linearization:
        power = np.exp(-theta[:, 1:] * TIMES)
        residual = observed[rows] - theta[:, :1] * power
        return Linearization(
            residual=residual,
            slopes=np.stack([power, -theta[:, :1] * TIMES * power], axis=1),
            weights=given[rows],
            objective=(given[rows] * residual**2).sum(axis=1),
        )

    settings = {"bounds": WIDE, "max_steps": 200, "step_tolerance": 1e-10, **options}
    return minimize(start, linearize, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(3))
def test_every_row_ends_where_scipys_does(seed: int) -> None:
    generator = np.random.default_rng(seed)
    observed = decays(generator, 20)
    weights = generator.integers(0, 4, observed.shape).astype(float)
    start = np.tile([5.0, 0.05], (20, 1))
    found = fit_decays(observed, start, weights)
    for row in range(20):
        root = np.sqrt(weights[row])

        def residuals(theta: np.ndarray, row: int = row, root: np.ndarray = root) -> np.ndarray:
            return root * (observed[row] - theta[0] * np.exp(-theta[1] * TIMES))

        searched = least_squares(residuals, [1.0, 1.0], xtol=1e-15, ftol=1e-15, gtol=1e-15)
        np.testing.assert_allclose(found.coefficients[row], searched.x, rtol=1e-5)
        assert found.objective[row] == pytest.approx(2 * searched.cost, rel=1e-8)
    assert (found.last_step <= 1e-10).all()
    # The caller's starting points are unchanged.
    assert (start == [5.0, 0.05]).all()


def test_rows_do_not_feel_each_other() -> None:
    observed = decays(np.random.default_rng(5), 8)
    start = np.tile([1.0, 1.0], (8, 1))
    together = fit_decays(observed, start).coefficients
    for row in range(8):
        alone = fit_decays(observed[row : row + 1], start[:1]).coefficients[0]
        np.testing.assert_allclose(together[row], alone, rtol=1e-9)


def test_bounds_and_the_largest_step_hold() -> None:
    observed = decays(np.random.default_rng(6), 5)
    start = np.tile([1.0, 0.1], (5, 1))
    bounded = fit_decays(observed, start, bounds=([0.0, 0.0], [np.inf, 0.15]))
    assert (bounded.coefficients[:, 1] <= 0.15).all()
    one = fit_decays(observed, start, max_steps=1, largest_step=0.01)
    assert np.abs(one.coefficients - start).max() <= 0.01 + 1e-15
    assert (one.last_step > 0).all()


def test_no_step_makes_a_row_worse() -> None:
    observed = decays(np.random.default_rng(7), 30)
    # From here, undamped Gauss-Newton steps overshoot.
    start = np.tile([20.0, 4.0], (30, 1))
    objectives = [fit_decays(observed, start, max_steps=steps).objective for steps in range(12)]
    assert all((later <= earlier).all() for earlier, later in itertools.pairwise(objectives))
    assert (objectives[-1] < objectives[0]).all()


def test_a_coefficient_that_nothing_determines_stays() -> None:
    observed = decays(np.random.default_rng(8), 1)
    found = fit_decays(observed, np.array([[1.0, 1.0]]), np.zeros_like(observed))
    assert found.coefficients.tolist() == [[1.0, 1.0]]
