"""Checks claims against runs: published coefficients, or an N and a D for a budget.

Coefficients are strings exactly as printed, because their precision is part of the claim: rounding
an exponent by half a unit of its last digit moves the optimum by more than most intervals' width.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from paceline.core.errors import UsageError
from paceline.core.finding import Finding
from paceline.scaling.fits.all_methods import ScalingFit
from paceline.scaling.fits.parametric import fit_huber, huber_objective
from paceline.scaling.surface import LossSurface, compute_for

_SPENT_TOLERANCE = 0.02
_ROUNDING = 0.1
# Even the true coefficients exceed the best fit's objective, by a fraction of about 5 coefficients
# per number of runs. An excess of three times that fraction is not chance.
_OBJECTIVE_EXCESS = 15.0
_WRONG_SIZE = 1.25
COEFFICIENT_NAMES = ("E", "A", "alpha", "B", "beta")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllocationCost:
    """Cost of training a claimed model, according to the fitted surface."""

    loss: float
    """Loss of the claimed model."""
    best_loss: float
    """Loss of the best model for the budget."""
    spent: float
    """6ND of the claim, as a fraction of the budget."""
    wasted: float
    """Share of the FLOPs spent that the best model would not have needed."""


def check_allocation(
    fit: ScalingFit, compute: float, parameters: float, tokens: float
) -> tuple[AllocationCost, list[Finding]]:
    """Prices a claimed N and D for a budget, and returns problems with them."""
    surface = fit.parametric.surface
    spent = float(compute_for(parameters, tokens))
    loss = float(surface.loss(parameters, tokens))
    cost = AllocationCost(
        loss=loss,
        best_loss=float(surface.optimal_loss(compute)),
        spent=spent / compute,
        wasted=1 - float(surface.compute_for_loss(loss)) / spent,
    )
    best = float(surface.optimal_parameters(compute))
    return cost, list(_allocation_findings(cost, compute, parameters, best))


def _allocation_findings(
    cost: AllocationCost, compute: float, parameters: float, best: float
) -> Iterator[Finding]:
    if abs(cost.spent - 1) > _SPENT_TOLERANCE:
        yield Finding(
            name="inconsistent_compute",
            message=f"6ND is {cost.spent:.2f} of the budget of {compute:.3g} FLOPs: N and D were "
            "fitted separately",
            remedy="fit N and use D = C/6N",
        )
    ratio = parameters / best
    if not 1 / _WRONG_SIZE < ratio < _WRONG_SIZE:
        yield Finding(
            name="wrong_size",
            message=f"N = {parameters:.3g} is {ratio:.2g} times the best {best:.3g}; the loss is "
            f"{cost.loss:.4f} instead of {cost.best_loss:.4f}, and {cost.wasted:.0%} of the FLOPs "
            "spent are wasted",
            remedy="fit in log space, and fit all runs rather than the lowest of each budget",
        )


def check_coefficients(
    fit: ScalingFit, printed: Sequence[str], compute: float
) -> Iterator[Finding]:
    """Yields problems with printed coefficients E, A, alpha, B, beta for the same runs."""
    surface = LossSurface(*map(_parse, COEFFICIENT_NAMES, printed))
    best = fit_huber(fit.sweep, np.ones((1, len(fit.sweep)))).surface
    reached, least = (huber_objective(fit.sweep, claimed) for claimed in (surface, best))
    if reached > least * (1 + _OBJECTIVE_EXCESS / len(fit.sweep)):
        sizes = [float(claimed.optimal_parameters(compute)) for claimed in (surface, best)]
        yield Finding(
            name="loose_optimiser",
            message=f"these coefficients have an objective of {reached:.3g}, but {least:.3g} can "
            f"be reached; N at {compute:.3g} FLOPs is {sizes[0]:.3g} instead of {sizes[1]:.3g}",
            remedy="sum Huber's loss over the runs instead of averaging it, tighten the "
            "tolerance, and start from a grid",
        )
    low, high = rounding_range(printed, compute)
    if high / low - 1 > _ROUNDING:
        yield Finding(
            name="rounded_coefficients",
            message=f"with the published digits, N at {compute:.3g} FLOPs may be anything from "
            f"{low:.3g} to {high:.3g}",
            remedy="keep all digits of the coefficients, above all of the exponents",
        )


def rounding_range(printed: Sequence[str], compute: float) -> tuple[float, float]:
    """Returns the range of the best N given the rounding of the printed coefficients."""
    ends = []
    for name, text in zip(COEFFICIENT_NAMES, printed, strict=True):
        value, half = _parse(name, text), _half_unit(text)
        ends.append((value - half, value + half))
    # N is monotonic in each coefficient, so the extremes lie at corners.
    sizes = [
        float(LossSurface(*corner).optimal_parameters(compute))
        for corner in itertools.product(*ends)
    ]
    return min(sizes), max(sizes)


def _parse(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"coefficient {name} is {text!r}; it must be a number") from None


def _half_unit(text: str) -> float:
    mantissa, _, exponent = text.lower().partition("e")
    digits = len(mantissa.partition(".")[2])
    return 0.5 * 10.0 ** (int(exponent or 0) - digits)
