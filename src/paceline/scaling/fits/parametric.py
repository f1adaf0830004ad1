"""The parametric methods: one surface fitted to all runs at once, and a test of whether it fits.

`fit_parametric` uses variable projection. Replicates whose exponents reach the allowed range are
dropped and counted: if there are many of them, the sweep does not determine the surface.

`fit_huber` is the method as published (Hoffmann et al. 2022): a Huber loss with a knee of 1e-3 on
log L, robust to a few bad runs, from a grid of starts because it has several local minima. The
objective is a sum over runs, never a mean, and iteration stops only when the surface stops moving:
a mean with an optimiser's default tolerance would stop near the starting point.

`find_lack_of_fit` tests whether the residuals are noise. Known departures leave known patterns: the
penalty of a learning rate tuned at one size grows with the square of log N; an optimum that drifts
with compute couples log N and log D; a warm-up of fixed length costs in proportion to 1/D. Each of
these, and low powers of both logarithms as a catch-all, is subjected to an F test after projecting
out the surface's own coefficients, with p-values times the number of tests (Bonferroni).
"""

import dataclasses
import itertools

import numpy as np

from paceline.core.errors import UsageError
from paceline.scaling.fits.least_squares import (
    FittedSurfaces,
    Linearization,
    Minimum,
    Rows,
    fit_projection,
    minimize,
)
from paceline.scaling.surface import Array, LossSurface, optimal_parameters, tokens_for
from paceline.scaling.sweep import MethodName, Sweep, require_replicates, widen

NUM_COEFFICIENTS = 5


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SurfaceFit:
    """A surface, its replicates, and its residuals."""

    method: MethodName
    surface: LossSurface
    replicates: FittedSurfaces
    residuals: Array
    """Log of observed over fitted loss, for every run."""

    @property
    def exponent(self) -> float:
        """Exponent of C in the best N."""
        return self.surface.allocation_exponent

    @property
    def noise(self) -> float:
        """Standard deviation of the residuals: the noise of a run, as a fraction of its loss."""
        freedom = max(len(self.residuals) - NUM_COEFFICIENTS, 1)
        return float(np.sqrt((self.residuals**2).sum() / freedom))

    @property
    def failed_fraction(self) -> float:
        """Share of the replicates that failed to determine a surface."""
        return float(1 - self.replicates.is_converged.mean())

    def optimum(self, compute: Array) -> tuple[Array, Array]:
        """Returns the best N and its loss for each budget."""
        return self.surface.optimal_parameters(compute), self.surface.optimal_loss(compute)

    def draws(self, compute: Array) -> tuple[Array, Array]:
        """Returns the best N and its loss for each budget, with one row per replicate."""
        drawn = optima_of(self.replicates, compute)
        num_runs = len(self.residuals)
        parameters, loss = (
            widen(value, draws, num_runs, NUM_COEFFICIENTS)
            for value, draws in zip(self.optimum(compute), drawn, strict=True)
        )
        return parameters, loss

    def loss_draws(self, parameters: float, tokens: float) -> Array:
        """Returns the loss of a run of the given size, one value per converged replicate."""
        drawn = losses_of(self.replicates, parameters, tokens)[:, 0]
        value = self.surface.loss(parameters, tokens)
        return widen(value, drawn, len(self.residuals), NUM_COEFFICIENTS)


def fit_parametric(sweep: Sweep, counts: Array) -> SurfaceFit:
    """Fits the surface to a sweep, and once to each row of counts."""
    require_runs(sweep)
    surface = first_surface(fit_projection(sweep.parameters, sweep.tokens, sweep.loss))
    replicates = fit_projection(sweep.parameters, sweep.tokens, sweep.loss, counts)
    require_replicates("parametric", float(replicates.is_converged.mean()))
    return SurfaceFit(
        method="parametric",
        surface=surface,
        replicates=replicates,
        residuals=residuals_of(surface, sweep),
    )


def require_runs(sweep: Sweep) -> None:
    """Raises an error if the sweep has too few distinct runs for five coefficients."""
    num_points = len(np.unique(np.stack([sweep.parameters, sweep.tokens]), axis=1).T)
    if num_points <= NUM_COEFFICIENTS:
        raise UsageError(
            f"{num_points} distinct runs cannot determine the {NUM_COEFFICIENTS} coefficients of a "
            "loss surface; add runs at other sizes and budgets"
        )


def first_surface(fit: FittedSurfaces) -> LossSurface:
    """Returns the surface of the first row; raises an error if it has not converged."""
    if not fit.is_converged[0]:
        raise UsageError(
            "no surface E + A/N^alpha + B/D^beta describes these runs: the loss does not fall "
            "with N and D as it should; check the runs, or add sizes and budgets"
        )
    return LossSurface(*fit.coefficients[0].tolist())


def residuals_of(surface: LossSurface, sweep: Sweep) -> Array:
    """Returns the log of observed over predicted loss, for every run."""
    return np.asarray(np.log(sweep.loss / surface.loss(sweep.parameters, sweep.tokens)))


def optima_of(fit: FittedSurfaces, compute: Array) -> tuple[Array, Array]:
    """Returns the best N and its loss for every converged replicate."""
    _floor, scale_n, alpha, scale_d, beta = fit.coefficients[fit.is_converged].T[..., None]
    parameters = optimal_parameters(compute, scale_n, alpha, scale_d, beta)
    return parameters, losses_of(fit, parameters, tokens_for(compute, parameters))


def losses_of(fit: FittedSurfaces, parameters: Array | float, tokens: Array | float) -> Array:
    """Returns the loss at the given sizes, with one row per converged replicate."""
    floor, scale_n, alpha, scale_d, beta = fit.coefficients[fit.is_converged].T[..., None]
    return np.asarray(floor + scale_n * parameters**-alpha + scale_d * tokens**-beta)


KNEE = 1e-3
_START_EXPONENTS = (0.1, 0.3, 0.6, 1.2)
_START_FLOORS = (0.2, 0.6, 0.9)
_START_FRACTIONS = (0.2, 0.5, 0.8)
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
    surface = first_surface(_surfaces(best[None], objective[:1], centres))
    return SurfaceFit(
        method="huber", surface=surface, replicates=drawn, residuals=residuals_of(surface, sweep)
    )


def _starts(loss: Array) -> Array:
    """Returns rows of log E, log A, alpha, log B, beta, with N and D relative to their centres."""
    lowest, middle = float(loss.min()), float(np.median(loss))
    rows = []
    for alpha, beta, floor, fraction in itertools.product(
        _START_EXPONENTS, _START_EXPONENTS, _START_FLOORS, _START_FRACTIONS
    ):
        reducible = middle - floor * lowest
        log_e, log_a, log_b = np.log(
            [floor * lowest, fraction * reducible, (1 - fraction) * reducible]
        )
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


_CERTAIN = 0.02
_SMALLEST_PATTERN = 1e-4
_POWERS = ((1, 1), (2, 0), (0, 2), (3, 0), (0, 3))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LackOfFit:
    """The most significant pattern in the residuals."""

    chance: float
    """Probability of a pattern at least as strong if the surface were right."""
    size: float
    """Root mean square of the pattern, as a fraction of the loss."""
    resembles: str
    """A cause that leaves a pattern like this, in words."""

    @property
    def is_certain(self) -> bool:
        """Whether the pattern is significant and large enough to change an answer."""
        return self.chance <= _CERTAIN and self.size >= _SMALLEST_PATTERN


def find_lack_of_fit(sweep: Sweep, fit: SurfaceFit) -> LackOfFit | None:
    """Tests the residuals for patterns; returns None if there are too few runs."""
    centre = np.exp(np.log(sweep.parameters).mean()), np.exp(np.log(sweep.tokens).mean())
    slopes = fit.surface.log_slopes(sweep.parameters, sweep.tokens, centre)
    tangent, _ = np.linalg.qr(slopes / np.linalg.norm(slopes, axis=0))
    residual = fit.residuals - tangent @ (tangent.T @ fit.residuals)
    patterns = _patterns(sweep)
    found = []
    for resembles, columns in patterns.items():
        free = columns - tangent @ (tangent.T @ columns)
        tested = _test(residual, free, len(sweep) - tangent.shape[1])
        if tested is not None:
            chance, size = tested
            chance = min(1.0, chance * len(patterns))
            found.append(LackOfFit(chance=chance, size=size, resembles=resembles))
    if not found:
        return None
    strongest = min(found, key=lambda lack: lack.chance)
    named = min(found[:-1], key=lambda lack: lack.chance, default=strongest)
    # A strong departure is significant in every pattern, and most in the most flexible one.
    resembles = named.resembles if named.chance < _CERTAIN else strongest.resembles
    return dataclasses.replace(strongest, resembles=resembles)


def _patterns(sweep: Sweep) -> dict[str, Array]:
    u, v = (_standardised(np.log(column)) for column in (sweep.parameters, sweep.tokens))
    return {
        "a learning rate tuned at one size only": (u**2)[:, None],
        "an optimum that drifts with compute": (u * v)[:, None],
        "a warm-up of the same length for all runs": (sweep.tokens.min() / sweep.tokens)[:, None],
        "no known cause": np.stack([u**i * v**j for i, j in _POWERS], axis=1),
    }


def _test(residual: Array, patterns: Array, freedom: int) -> tuple[float, float] | None:
    """Returns the p-value of the patterns and the RMS of the residual that they explain."""
    from scipy.special import fdtrc

    basis, scales, _ = np.linalg.svd(patterns, full_matrices=False)
    # Drop directions that the surface itself can absorb.
    basis = basis[:, scales > 1e-6 * max(float(scales.max()), 1.0)]
    freedom -= basis.shape[1]
    if freedom < 1 or not basis.shape[1]:
        return None
    explained = float(((basis.T @ residual) ** 2).sum())
    rest = max(float((residual**2).sum()) - explained, 1e-300)
    ratio = (explained / basis.shape[1]) / (rest / freedom)
    chance = float(fdtrc(basis.shape[1], freedom, ratio))
    return chance, float(np.sqrt(explained / len(residual)))


def _standardised(values: Array) -> Array:
    return np.asarray((values - values.mean()) / max(float(values.std()), 1e-12))
