"""What every method answers: the best N and D and the loss there, with bands, at any budget.

A method has a point estimate and draws (replicates of it). N is drawn, D is always C / 6N, so that
the two can never contradict each other. Bands are percentiles of the draws.
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
    """A number per budget, with the interval of its draws."""

    value: Array
    low: Array
    high: Array

    def at(self, index: int) -> Estimate:
        """Returns the estimate at one of the budgets."""
        value = float(self.value[index])
        # Percentiles of a skewed bootstrap may pass the estimate itself.
        return Estimate(
            value=value,
            low=min(float(self.low[index]), value),
            high=max(float(self.high[index]), value),
        )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Prediction:
    """One method's answer for some budgets."""

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
        fit: What one method made of the runs.
        compute: The budgets in FLOPs.
        level: Probability with which an interval is to hold the truth.
    """
    parameters, loss = fit.optimum(compute)
    drawn_parameters, drawn_loss = fit.draws(compute)
    sizes = _band(parameters, drawn_parameters, level)
    return Prediction(
        method=fit.method,
        compute=compute,
        parameters=sizes,
        # The fewer parameters, the more tokens.
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
    """Returns the loss that one more run should end with.

    The interval is for the run, not for the surface: the noise of a run is part of it.

    Args:
        fit: What the parametric method made of the runs so far.
        parameters: N of the run.
        tokens: D of the run.
        level: Probability with which the interval is to hold the run's loss.
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
