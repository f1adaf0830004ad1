"""The parametric method as published: Huber loss on log L, from a grid of starting points.

The logarithm of the surface is a log-sum-exp of five unconstrained numbers. A Huber loss with a
knee of 1e-3 is nearly an absolute error, robust to a few bad runs. It has several local minima,
hence the grid of starts. All starts, and then all replicates, take damped Gauss-Newton steps in one
batch. The objective is a sum over runs, never a mean, and iteration stops only when the surface
stops moving: a mean with an optimiser's default tolerance would stop near the starting point.
"""

import itertools

import numpy as np

from paceline.scaling.fits.bootstrap import require_replicates
from paceline.scaling.fits.levenberg_marquardt import Linearization, Minimum, Rows, minimize
from paceline.scaling.fits.parametric import SurfaceFit, require_runs, residuals_of, surface_of
from paceline.scaling.fits.variable_projection import FittedSurfaces
from paceline.scaling.runs.sweep import Sweep
from paceline.scaling.surface import Array, LossSurface

KNEE = 1e-3
_START_EXPONENTS = (0.1, 0.3, 0.6, 1.2)
_START_FLOORS = (0.2, 0.6, 0.9)
_START_SHARES = (0.2, 0.5, 0.8)
_MAX_STEPS = 300
_CONVERGED_GAIN = 1e-8
_CONVERGED_STEP = 1e-7
_LARGEST_STEP = 2.0
_TINY = 1e-300
_CHUNK_ELEMENTS = 250_000
_EXPONENT_RANGE = (0.01, 4.0)
_BOUNDS = (
    np.array([-np.inf, -np.inf, _EXPONENT_RANGE[0], -np.inf, _EXPONENT_RANGE[0]]),
    np.array([np.inf, np.inf, _EXPONENT_RANGE[1], np.inf, _EXPONENT_RANGE[1]]),
)


def huber_objective(sweep: Sweep, surface: LossSurface) -> float:
    """Returns the sum over runs of the Huber loss of the residual in log L."""
    return float(_huber(residuals_of(surface, sweep)).sum())


def fit_huber(sweep: Sweep, counts: Array) -> SurfaceFit:
    """Fits the surface from a grid of starts, then every row of counts from the best fit."""
    require_runs(sweep)
    centres = np.array([np.log(sweep.parameters).mean(), np.log(sweep.tokens).mean()])
    log_n, log_d = np.log(sweep.parameters) - centres[0], np.log(sweep.tokens) - centres[1]
    log_loss = np.log(sweep.loss)
    starts = _starts(sweep.loss)
    everything = np.broadcast_to(1.0, (len(starts), len(sweep)))
    found, objective = _descend(starts, log_n, log_d, log_loss, everything)
    best = found[objective.argmin()]
    replicates, squares = _descend(
        np.repeat(best[None], len(counts), axis=0), log_n, log_d, log_loss, counts
    )
    drawn = _surfaces(replicates, squares, centres)
    require_replicates("huber", float(drawn.is_converged.mean()))
    surface = surface_of(_surfaces(best[None], objective[:1], centres), 0)
    return SurfaceFit(
        method="huber", surface=surface, replicates=drawn, residuals=residuals_of(surface, sweep)
    )


def _starts(loss: Array) -> Array:
    """Returns rows of log E, log A, alpha, log B, beta, with N and D relative to their centres."""
    lowest, middle = float(loss.min()), float(np.median(loss))
    rows = []
    for alpha, beta, floor, share in itertools.product(
        _START_EXPONENTS, _START_EXPONENTS, _START_FLOORS, _START_SHARES
    ):
        reducible = middle - floor * lowest
        log_e, log_a, log_b = np.log([floor * lowest, share * reducible, (1 - share) * reducible])
        rows.append([log_e, log_a, alpha, log_b, beta])
    return np.array(rows)


def _huber(residual: Array) -> Array:
    size = np.abs(residual)
    return np.where(size <= KNEE, 0.5 * residual**2, KNEE * (size - 0.5 * KNEE))


def _descend(
    start: Array, log_n: Array, log_d: Array, log_loss: Array, counts: Array
) -> tuple[Array, Array]:
    """Descends from every row of `start`, in chunks that bound memory."""
    size = max(1, _CHUNK_ELEMENTS // len(log_n))
    parts = [
        _descend_chunk(start[begin:end], log_n, log_d, log_loss, counts[begin:end])
        for begin, end in ((at, at + size) for at in range(0, len(start), size))
    ]
    return (
        np.concatenate([part.coefficients for part in parts]),
        np.concatenate([part.objective for part in parts]),
    )


def _descend_chunk(
    start: Array, log_n: Array, log_d: Array, log_loss: Array, counts: Array
) -> Minimum:
    def linearize(theta: Array, rows: Rows) -> Linearization:
        log_e, log_a, alpha, log_b, beta = theta.T[..., None]
        floor = np.broadcast_to(log_e, (len(theta), len(log_n)))
        terms = np.stack([floor, log_a - alpha * log_n, log_b - beta * log_d], axis=1)
        log_surface = np.logaddexp.reduce(terms, axis=1)
        of_e, of_n, of_d = np.exp(terms - log_surface[:, None, :]).swapaxes(0, 1)
        residual = log_loss - log_surface
        # Iteratively reweighted least squares: beyond the knee the loss is linear in the residual.
        weights = np.minimum(1.0, KNEE / np.maximum(np.abs(residual), _TINY))
        return Linearization(
            residual=residual,
            slopes=np.stack([of_e, of_n, -of_n * log_n, of_d, -of_d * log_d], axis=1),
            weights=counts[rows] * weights,
            objective=(counts[rows] * _huber(residual)).sum(axis=1),
        )

    return minimize(
        start,
        linearize,
        bounds=_BOUNDS,
        max_steps=_MAX_STEPS,
        step_tolerance=_CONVERGED_STEP,
        gain_tolerance=_CONVERGED_GAIN,
        largest_step=_LARGEST_STEP,
    )


def _surfaces(theta: Array, objective: Array, centres: Array) -> FittedSurfaces:
    exponents = theta[:, 2::2]
    coefficients = theta.copy()
    coefficients[:, 1::2] += exponents * centres
    coefficients[:, [0, 1, 3]] = np.exp(coefficients[:, [0, 1, 3]])
    is_inside = (exponents > _EXPONENT_RANGE[0]) & (exponents < _EXPONENT_RANGE[1])
    return FittedSurfaces(
        coefficients=coefficients, squares=objective, is_converged=np.asarray(is_inside.all(axis=1))
    )
