"""Predictions common to all methods: the best N and D and their loss, with bands, at any budget.

A method provides a point estimate and draws (replicates). N is drawn and D is always C / 6N, so
that the two are consistent. Bands are percentiles of the draws.
"""

import dataclasses

import numpy as np

from paceline.core.plan import Estimate
from paceline.scaling.fits.bootstrap import MethodName
from paceline.scaling.fits.isoflop import PowerLawFit
from paceline.scaling.fits.parametric import SurfaceFit
from paceline.scaling.surface import Array, tokens_for

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


def predict_loss(
    fit: SurfaceFit,
    parameters: float,
    tokens: float,
    *,
    level: float = DEFAULT_LEVEL,
    seed: int = 0,
) -> Estimate:
    """Returns the predicted loss of one more run.

    The interval is for the run, not for the surface, so it includes the noise of a run.

    Args:
        fit: The parametric fit of the runs so far.
        parameters: N of the run.
        tokens: D of the run.
        level: Coverage probability of the interval.
        seed: Seed of the noise.
    """
    value = fit.surface.loss(parameters, tokens)
    draws = fit.loss_draws(parameters, tokens)
    noise = np.random.default_rng(seed).normal(0, fit.noise, len(draws))
    return _band(value[None], (draws * np.exp(noise))[:, None], level).at(0)


def _band(value: Array, draws: Array, level: float) -> Band:
    tails = [50 * (1 - level), 50 * (1 + level)]
    low, high = np.nanpercentile(draws, tails, axis=0)
    return Band(value=value, low=low, high=high)
