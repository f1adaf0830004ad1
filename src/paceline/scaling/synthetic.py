"""Sweeps sampled from a known surface, as ground truth for evaluating methods.

Noise multiplies the loss, as different seeds do. Three departures from the surface model common
problems of real sweeps: an optimum that drifts with compute (the surface is no longer a sum of two
terms), a learning rate tuned at one size only, and a warm-up of equal length for short and long
runs (Porian et al. 2024, arXiv 2406.19146, found the last two behind Kaplan's exponent).
"""

import dataclasses

import numpy as np

from paceline.core.errors import UsageError
from paceline.scaling.surface import Array, LossSurface, compute_for, tokens_for
from paceline.scaling.sweep import Curve, Sweep

COURSE_BUDGETS = (6e18, 1e19, 3e19, 6e19, 1e20, 3e20, 6e20, 1e21, 3e21)
_DRIFTS_FROM = COURSE_BUDGETS[0]
_TUNED_AT = 1e8
_NUM_CURVE_POINTS = 60


@dataclasses.dataclass(frozen=True, kw_only=True)
class Departure:
    """Departures of the runs from the surface; zero means none."""

    drift: float = 0.0
    """Power of the budget over 6e18 FLOPs that multiplies a model's effective size."""
    untuned_learning_rate: float = 0.0
    """Relative loss added per squared e-fold of N from 1e8, where the rate was tuned."""
    fixed_warmup_tokens: float = 0.0
    """Tokens of each run that do not reduce the loss."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepDesign:
    """The runs of a sweep: for every budget, sizes around the optimum."""

    budgets: tuple[float, ...] = COURSE_BUDGETS
    """Budgets in FLOPs."""
    num_sizes: int = 8
    """Models per budget."""
    reach: float = 5.0
    """Factor by which a budget's smallest and largest models differ from the optimum."""
    offset: float = 1.0
    """Ratio of the sizes' centre to the true optimum, which is unknown in practice."""
    drift: float = 0.0
    """Power of the budget over the middle budget that multiplies that ratio."""

    def __post_init__(self) -> None:
        if self.num_sizes < 1 or self.reach < 1 or self.offset <= 0:
            raise UsageError("SweepDesign needs at least one size, a reach of 1 and an offset")


def design_runs(surface: LossSurface, design: SweepDesign) -> tuple[Array, Array]:
    """Returns the parameters and compute of a design's runs."""
    budgets = np.asarray(design.budgets, dtype=np.float64)
    factors = np.geomspace(1 / design.reach, design.reach, design.num_sizes)
    middle = np.exp(np.log(budgets).mean())
    centres = (
        surface.optimal_parameters(budgets) * design.offset * (budgets / middle) ** design.drift
    )
    parameters = np.outer(centres, factors)
    return parameters.ravel(), np.repeat(budgets, design.num_sizes)


def true_loss(
    surface: LossSurface, parameters: Array, tokens: Array, departure: Departure | None = None
) -> Array:
    """Returns the noise-free loss."""
    if departure is None:
        return surface.loss(parameters, tokens)
    effective = parameters * (compute_for(parameters, tokens) / _DRIFTS_FROM) ** departure.drift
    useful = np.maximum(tokens - departure.fixed_warmup_tokens, 0.01 * tokens)
    detuned = departure.untuned_learning_rate * np.log(parameters / _TUNED_AT) ** 2
    return np.asarray(surface.loss(effective, useful) * (1 + detuned))


def synthetic_sweep(
    surface: LossSurface,
    design: SweepDesign | None = None,
    *,
    noise: float = 0.0,
    departure: Departure | None = None,
    with_curves: bool = False,
    seed: int = 0,
) -> Sweep:
    """Generates a sweep with a known ground truth.

    Args:
        surface: The ground truth.
        design: Budgets and sizes of the runs.
        noise: Relative standard deviation of a run's loss.
        departure: Ways in which the runs differ from the surface.
        with_curves: Whether runs have training curves.
        seed: Seed of the noise.
    """
    parameters, compute = design_runs(surface, design or SweepDesign())
    tokens = tokens_for(compute, parameters)
    generator = np.random.default_rng(seed)
    factor = np.exp(noise * generator.standard_normal(len(parameters)))
    loss = true_loss(surface, parameters, tokens, departure) * factor
    curves: tuple[Curve, ...] = ()
    if with_curves:
        fractions = np.geomspace(0.01, 1.0, _NUM_CURVE_POINTS)
        curves = tuple(
            Curve(tokens=total * fractions, loss=surface.loss(size, total * fractions) * own)
            for size, total, own in zip(parameters, tokens, factor, strict=True)
        )
    return Sweep(parameters=parameters, tokens=tokens, loss=loss, compute=compute, curves=curves)
