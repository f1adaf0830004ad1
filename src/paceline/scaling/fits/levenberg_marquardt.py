"""Levenberg-Marquardt for many small least-squares problems at once.

Each row is a problem: a start of a grid, a bootstrap replicate, a point of a profile. Rows share
one NumPy call per step but have separate damping; a converged row leaves the batch. A step that
does not lower its row's objective is rejected, and the damping is increased. Robust losses are
expressed as weights that depend on the residuals (iteratively reweighted least squares), together
with the objective that they represent. Variable projection is expressed as slopes from which the
linear coefficients are projected out.

Reference: Marquardt 1963; the damping is scaled by the diagonal of the curvature, as in the paper.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.scaling.surface import Array

Rows = npt.NDArray[np.intp]

_FIRST_DAMPING = 1e-3
_DAMPING_RANGE = (1e-12, 1e12)
# Keeps the solve non-singular where the residuals do not determine a coefficient.
_TINY = 1e-300


class Linearization(NamedTuple):
    """Linearised problems: rows are problems, the last axis runs over residuals."""

    residual: Array
    """Observed minus fitted values: rows, residuals."""
    slopes: Array
    """Derivatives of the fitted values by the coefficients: rows, coefficients, residuals."""
    weights: Array
    """Weights of the squared residuals: rows, residuals."""
    objective: Array
    """The minimised value, one number per row."""


class Minimum(NamedTuple):
    """The result of the minimisation, per row."""

    coefficients: Array
    """The best coefficients: rows, coefficients."""
    objective: Array
    """The objective there, one number per row."""
    last_step: Array
    """Largest coefficient change of the last attempted step of each row."""


def minimize(
    start: Array,
    linearize: Callable[[Array, Rows], Linearization],
    *,
    bounds: tuple[npt.ArrayLike, npt.ArrayLike],
    max_steps: int,
    step_tolerance: float = 0.0,
    gain_tolerance: float = 0.0,
    largest_step: float = np.inf,
) -> Minimum:
    """Minimises every row from `start` until it converges.

    Args:
        start: Initial coefficients, a row per problem.
        linearize: Linearises the problems with the given row indices at the given coefficients.
        bounds: Lower and upper bounds of the coefficients; steps are clipped to them.
        max_steps: Maximum number of steps; rows that have not converged keep their best point.
        step_tolerance: A row converges if its step changes no coefficient by more than this.
        gain_tolerance: A row also converges if its objective falls by less than this share.
        largest_step: Largest change of a coefficient in one step.
    """
    best = start.copy()
    rows = np.arange(len(best))
    objective, gradient, curvature = _normal_equations(linearize(best, rows))
    damping = np.full(len(best), _FIRST_DAMPING)
    last_step = np.full(len(best), np.inf)
    for _ in range(max_steps):
        diagonal = np.einsum("rii->ri", curvature[rows])
        ridge = (damping[rows, None] * diagonal + _TINY)[..., None] * np.eye(best.shape[1])
        step = np.linalg.solve(curvature[rows] + ridge, gradient[rows][..., None])[..., 0]
        step = np.clip(step, -largest_step, largest_step)
        candidate = np.clip(best[rows] + step, *bounds)
        last_step[rows] = np.abs(candidate - best[rows]).max(axis=1)
        reached, its_gradient, its_curvature = _normal_equations(linearize(candidate, rows))
        gain = objective[rows] - reached
        is_better = gain >= 0
        taken = rows[is_better]
        best[taken], objective[taken] = candidate[is_better], reached[is_better]
        gradient[taken], curvature[taken] = its_gradient[is_better], its_curvature[is_better]
        factor = np.where(is_better, 0.2, 10.0)
        damping[rows] = np.clip(damping[rows] * factor, *_DAMPING_RANGE)
        is_still = (last_step[rows] <= step_tolerance) | np.where(
            is_better, gain < gain_tolerance * reached, damping[rows] == _DAMPING_RANGE[1]
        )
        rows = rows[~is_still]
        if not len(rows):
            break
    return Minimum(coefficients=best, objective=objective, last_step=last_step)


def _normal_equations(near: Linearization) -> tuple[Array, Array, Array]:
    weighted = near.slopes * near.weights[:, None, :]
    gradient = (weighted @ near.residual[..., None])[..., 0]
    return near.objective, gradient, weighted @ near.slopes.transpose(0, 2, 1)
