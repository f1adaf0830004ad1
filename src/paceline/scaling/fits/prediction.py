"""The best N and D and their loss at any budget with bands, and the profile interval of the best N.

A method provides a point estimate and draws (replicates). N is drawn and D is always C / 6N, so
that the two are consistent. Bands are percentiles of the draws.

The profile interval needs no replicates and checks the bootstrap. For a budget C, write the surface
about its own optimum (N*, D*): L = E + K (x/alpha + y/beta) with x = (N/N*)^-alpha and
y = (D/D*)^-beta, so that N* can be fixed at any value while the other four are refitted. The
interval contains the values whose sum of squares exceeds the minimum by no more than an F test
allows.
"""

import dataclasses

import numpy as np

from paceline.core.plan import Estimate
from paceline.scaling.fits.isoflop import PowerLawFit
from paceline.scaling.fits.least_squares import (
    CONVERGED_STEP,
    EXPONENT_RANGE,
    Linearization,
    Rows,
    minimize,
)
from paceline.scaling.fits.parametric import NUM_COEFFICIENTS, SurfaceFit
from paceline.scaling.surface import Array, tokens_for
from paceline.scaling.sweep import MethodName, Sweep

MethodFit = PowerLawFit | SurfaceFit

DEFAULT_LEVEL = 0.9


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Band:
    """An estimate per budget, with the interval of its draws."""

    value: Array
    low: Array
    high: Array

    def at(self, index: int) -> Estimate:
        """Returns the estimate at one of the budgets."""
        value = float(self.value[index])
        # Percentiles of a skewed bootstrap may exclude the estimate itself.
        return Estimate(
            value=value,
            low=min(float(self.low[index]), value),
            high=max(float(self.high[index]), value),
        )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Prediction:
    """One method's answer for several budgets."""

    method: MethodName
    """Name of the method."""
    compute: Array
    """The budgets in FLOPs."""
    parameters: Band
    """The best N at each budget."""
    tokens: Band
    """The best D at each budget."""
    loss: Band
    """Loss of the best model at each budget."""


def predict(fit: MethodFit, compute: Array, level: float = DEFAULT_LEVEL) -> Prediction:
    """Returns a method's answer with intervals.

    Args:
        fit: The fit of one method.
        compute: The budgets in FLOPs.
        level: Coverage probability of the intervals.
    """
    parameters, loss = fit.optimum(compute)
    drawn_parameters, drawn_loss = fit.draws(compute)
    sizes = _band(parameters, drawn_parameters, level)
    return Prediction(
        method=fit.method,
        compute=compute,
        parameters=sizes,
        # Fewer parameters mean more tokens, so the bounds swap.
        tokens=Band(
            value=tokens_for(compute, sizes.value),
            low=tokens_for(compute, sizes.high),
            high=tokens_for(compute, sizes.low),
        ),
        loss=_band(loss, drawn_loss, level),
    )


def predict_loss(fit: SurfaceFit, parameters: float, tokens: float, *, seed: int = 0) -> Estimate:
    """Returns the predicted loss of one more run.

    The interval is for the run, not for the surface, so it includes the noise of a run.
    """
    value = fit.surface.loss(parameters, tokens)
    draws = fit.loss_draws(parameters, tokens)
    noise = np.random.default_rng(seed).normal(0, fit.noise, len(draws))
    return _band(value[None], (draws * np.exp(noise))[:, None], DEFAULT_LEVEL).at(0)


def _band(value: Array, draws: Array, level: float) -> Band:
    tails = [50 * (1 - level), 50 * (1 + level)]
    low, high = np.nanpercentile(draws, tails, axis=0)
    return Band(value=value, low=low, high=high)


_NUM_POINTS = 81
_MAX_STEPS = 80
_WIDENINGS = 6
_TINY = 1e-300
_FINEST_REACH = 1e-9
# A best N that is uncertain by a factor of 1600 either way is undetermined.
_FARTHEST_REACH = float(np.log(1600.0))


def profile_interval(sweep: Sweep, fit: SurfaceFit, compute: float, level: float) -> Estimate:
    """Returns the best N for a budget, with its profile interval."""
    from scipy.special import fdtri

    best = float(fit.surface.optimal_parameters(compute))
    freedom = len(sweep) - NUM_COEFFICIENTS
    allowed = 1 + float(fdtri(1, freedom, level)) / freedom
    # The bootstrap only sets the initial search range; the interval is found independently of it.
    drawn = fit.draws(np.array([compute]))[0][:, 0]
    reach = min(max(2 * float(np.log(drawn).std()), _FINEST_REACH), _FARTHEST_REACH)
    for _ in range(_WIDENINGS):
        logs = np.log(best) + np.linspace(-reach, reach, _NUM_POINTS)
        squares = _profile_squares(sweep, fit, compute, np.exp(logs))
        excess = squares / max(float(squares.min()), _TINY) - allowed
        if (excess[0] > 0 and excess[-1] > 0) or reach == _FARTHEST_REACH:
            break
        reach = min(3 * reach, _FARTHEST_REACH)
    inside = np.flatnonzero(excess <= 0)
    low, high = (
        _crossing(logs, excess, int(edge), side)
        for edge, side in ((inside[0], -1), (inside[-1], 1))
    )
    return Estimate(value=best, low=min(low, best), high=max(high, best))


def _crossing(logs: Array, excess: Array, edge: int, side: int) -> float:
    """Returns where the excess crosses zero next to `edge`; the last point if it never does."""
    beyond = edge + side
    if not 0 <= beyond < len(logs):
        return float(np.exp(logs[edge]))
    fraction = excess[edge] / (excess[edge] - excess[beyond])
    return float(np.exp(logs[edge] + fraction * (logs[beyond] - logs[edge])))


def _profile_squares(sweep: Sweep, fit: SurfaceFit, compute: float, optima: Array) -> Array:
    """Returns the minimum sum of squared relative residuals for each value of the best N."""
    log_n = np.log(sweep.parameters) - np.log(optima)[:, None]
    log_d = np.log(sweep.tokens) - np.log(tokens_for(compute, optima))[:, None]
    exponents = np.tile(
        [fit.surface.parameter_exponent, fit.surface.token_exponent], (len(optima), 1)
    )

    def linearize(exponents: Array, rows: Rows) -> Linearization:
        """Linearises the problem in the exponents, with E and K projected out."""
        alpha, beta = exponents[:, :1], exponents[:, 1:]
        u, v = log_n[rows], log_d[rows]
        x, y = np.exp(-alpha * u) / alpha, np.exp(-beta * v) / beta
        # Errors are relative: dividing by the observed loss makes the target all ones.
        design = np.stack([np.ones_like(x), x + y], axis=1) / sweep.loss
        gram = design @ design.transpose(0, 2, 1)
        linear = np.linalg.solve(gram, design.sum(axis=2, keepdims=True))
        residual = 1 - (linear.transpose(0, 2, 1) @ design)[:, 0]
        slopes = np.stack([-x * (u + 1 / alpha), -y * (v + 1 / beta)], axis=1) / sweep.loss
        slopes *= linear[:, 1:]
        explained = np.linalg.solve(gram, design @ slopes.transpose(0, 2, 1))
        return Linearization(
            residual=residual,
            slopes=slopes - explained.transpose(0, 2, 1) @ design,
            weights=np.ones_like(residual),
            objective=(residual**2).sum(axis=1),
        )

    found = minimize(
        exponents,
        linearize,
        bounds=EXPONENT_RANGE,
        max_steps=_MAX_STEPS,
        step_tolerance=CONVERGED_STEP,
    )
    return found.objective
