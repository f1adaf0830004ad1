"""Least squares for many small problems at once: Levenberg-Marquardt, and variable projection.

A problem is a row: a start of a grid, a bootstrap replicate, a point of a profile. Rows share one
NumPy call per step but have separate damping; a converged row leaves the batch. A robust loss is
expressed as weights that depend on the residuals (iteratively reweighted least squares), together
with the objective that they represent.

`fit_projection` fits L = E + A/N^alpha + B/D^beta. For given exponents it is linear in E, A and B,
so only the exponents are searched, first on a grid, and the linear part is projected out. N and D
are relative to their geometric means, which alone reduces the condition number from 10^11 to about
10. Errors are relative to the observed loss, which is equivalent to fitting its logarithm.

scipy.optimize.least_squares, called for one row after the other, ends at the same minima (to 1e-7)
but takes 22 s instead of 2.4 s for 72 runs and a thousand replicates on one core, with exact
derivatives, bounds, and replicates that start at the best fit: 3.0 s instead of 1.3 s for the
projection, 19.1 s instead of 1.1 s for Huber's loss with its 144 starts. A slow test of
tests/unit/scaling/fits/test_cost.py repeats the comparison.

References: Marquardt 1963, with damping scaled by the diagonal of the curvature; Golub and Pereyra
1973, with Kaufman's Jacobian (1975).
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
        gain_tolerance: A row also converges if its objective falls by less than this fraction.
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


EXPONENT_RANGE = (0.02, 3.0)
_GRID = np.geomspace(0.06, 1.6, 18)
_MAX_STEPS = 60
CONVERGED_STEP = 1e-9
_CHUNK_ELEMENTS = 2_000_000
# Coefficients kept on each face of the octant of non-negative E, A and B, the interior first.
_FACES = ([0, 1, 2], [1, 2], [0, 1], [0, 2], [0])


class FittedSurfaces(NamedTuple):
    """The surface of every replicate, one row each."""

    coefficients: Array
    """E, A, alpha, B and beta: replicates, coefficients."""
    squares: Array
    """Sum of the squared relative residuals."""
    is_converged: npt.NDArray[np.bool_]
    """Whether the fit converged inside the exponent range, with positive A and B."""


def fit_projection(
    parameters: Array, tokens: Array, loss: Array, weights: Array | None = None
) -> FittedSurfaces:
    """Fits the runs once per row of `weights`; without weights, every run counts once."""
    rows = np.ones((1, len(loss))) if weights is None else weights
    size = max(1, _CHUNK_ELEMENTS // (len(loss) * 8))
    parts = [
        _fit_chunk(parameters, tokens, loss, rows[begin : begin + size])
        for begin in range(0, len(rows), size)
    ]
    return FittedSurfaces(*map(np.concatenate, zip(*parts, strict=True)))


def _fit_chunk(parameters: Array, tokens: Array, loss: Array, weights: Array) -> FittedSurfaces:
    centre_n, centre_d = (float(np.log(column).mean()) for column in (parameters, tokens))
    log_n, log_d = np.log(parameters) - centre_n, np.log(tokens) - centre_d
    # Relative residuals: (L - E - P x - Q y)/L, weighted by the counts.
    per_square = weights / loss**2
    per_loss = weights / loss
    start = _best_of_grid(log_n, log_d, per_square, per_loss, weights.sum(axis=1))

    def linearize(exponents: Array, rows: Rows) -> Linearization:
        return _linearize(exponents, log_n, log_d, per_square[rows], loss)

    found = minimize(
        start, linearize, bounds=EXPONENT_RANGE, max_steps=_MAX_STEPS, step_tolerance=CONVERGED_STEP
    )
    exponents = found.coefficients
    linear = _solve(exponents, log_n, log_d, per_square, loss).linear
    coefficients = np.empty((len(linear), 5))
    coefficients[:, 0] = linear[:, 0]
    coefficients[:, 1::2] = linear[:, 1:] * np.exp(exponents * [centre_n, centre_d])
    coefficients[:, 2::2] = exponents
    is_inside = (exponents > EXPONENT_RANGE[0]) & (exponents < EXPONENT_RANGE[1])
    has_terms = linear[:, 1:] > 0
    return FittedSurfaces(
        coefficients=coefficients,
        squares=found.objective,
        is_converged=(is_inside & has_terms).all(axis=1) & (found.last_step < 1e-4),
    )


def _best_of_grid(
    log_n: Array, log_d: Array, per_square: Array, per_loss: Array, total: Array
) -> Array:
    """Returns the alpha and beta of the grid with the least squares, one row per replicate."""
    x = np.exp(-np.outer(log_n, _GRID))
    y = np.exp(-np.outer(log_d, _GRID))
    num_x, num_y = x.shape[1], y.shape[1]
    xy = (x[:, :, None] * y[:, None, :]).reshape(len(log_n), -1)

    gram = np.empty((len(total), num_x, num_y, 3, 3))
    gram[..., 0, 0] = per_square.sum(axis=1)[:, None, None]
    gram[..., 0, 1] = gram[..., 1, 0] = (per_square @ x)[:, :, None]
    gram[..., 0, 2] = gram[..., 2, 0] = (per_square @ y)[:, None, :]
    gram[..., 1, 1] = (per_square @ x**2)[:, :, None]
    gram[..., 2, 2] = (per_square @ y**2)[:, None, :]
    gram[..., 1, 2] = gram[..., 2, 1] = (per_square @ xy).reshape(-1, num_x, num_y)
    moments = np.empty((len(total), num_x, num_y, 3))
    moments[..., 0] = per_loss.sum(axis=1)[:, None, None]
    moments[..., 1] = (per_loss @ x)[:, :, None]
    moments[..., 2] = (per_loss @ y)[:, None, :]
    linear = solve_non_negative(gram, moments)
    squares = total[:, None, None] - np.einsum("rxyi,rxyi->rxy", linear, moments)
    best = squares.reshape(len(total), -1).argmin(axis=1)
    return np.stack([_GRID[best // num_y], _GRID[best % num_y]], axis=1)


class _LinearPart(NamedTuple):
    """The best linear coefficients for given exponents, with the matrices they were solved from."""

    linear: Array
    design: Array
    """The columns 1, N^-alpha and D^-beta: replicates, coefficients, runs."""
    weighted: Array
    gram: Array


def _solve(
    exponents: Array, log_n: Array, log_d: Array, per_square: Array, loss: Array
) -> _LinearPart:
    design = np.ones((len(exponents), 3, len(log_n)))
    design[:, 1] = np.exp(-exponents[:, :1] * log_n)
    design[:, 2] = np.exp(-exponents[:, 1:] * log_d)
    weighted = design * per_square[:, None, :]
    gram = weighted @ design.transpose(0, 2, 1)
    linear = solve_non_negative(gram, weighted @ loss)
    return _LinearPart(linear, design, weighted, gram)


def _linearize(
    exponents: Array, log_n: Array, log_d: Array, per_square: Array, loss: Array
) -> Linearization:
    """Linearises the problem in the exponents, with the linear part projected out."""
    linear, design, weighted, gram = _solve(exponents, log_n, log_d, per_square, loss)
    residual = loss - (linear[:, None, :] @ design)[:, 0]
    slopes = -linear[:, 1:, None] * design[:, 1:]
    slopes[:, 0] *= log_n
    slopes[:, 1] *= log_d
    # A coefficient at its bound stays there when the exponents move.
    gives_way = (linear > 0).astype(np.float64)
    gram = gram * gives_way[:, :, None] * gives_way[:, None, :]
    cross = (weighted @ slopes.transpose(0, 2, 1)) * gives_way[:, :, None]
    explained = np.linalg.solve(gram + _ridge(gram, [0, 1, 2]), cross)
    return Linearization(
        residual=residual,
        slopes=slopes - explained.transpose(0, 2, 1) @ design,
        weights=per_square,
        objective=np.einsum("rn,rn->r", per_square, residual**2),
    )


def solve_non_negative(gram: Array, moments: Array) -> Array:
    """Solves normal equations subject to non-negative coefficients.

    With three unknowns, the faces of the positive octant can be enumerated.
    """
    best = np.zeros_like(moments)
    gain = np.full(moments.shape[:-1], -np.inf)
    for kept in _FACES:
        part = np.linalg.solve(
            gram[..., kept, :][..., kept] + _ridge(gram, kept), moments[..., kept, None]
        )[..., 0]
        candidate = np.zeros_like(moments)
        candidate[..., kept] = part
        reached = np.einsum("...i,...i->...", candidate, moments)
        is_better = (part >= 0).all(axis=-1) & (reached > gain)
        best = np.where(is_better[..., None], candidate, best)
        gain = np.where(is_better, reached, gain)
        if len(kept) == len(_FACES[0]) and np.isfinite(gain).all():
            # A solution in the interior is better than any on a face.
            break
    return best


def _ridge(gram: Array, kept: list[int]) -> Array:
    # 1e-15 of the diagonal: a duplicate column must not make the batch singular.
    diagonal = np.einsum("...ii->...i", gram)[..., kept]
    return np.asarray((1e-15 * diagonal + _TINY)[..., None] * np.eye(len(kept)))
