"""The cost of a wrong model size: the share of its FLOPs that the best model would save.

If the chosen method is a surface, the surface prices every size directly. If it is a power law, a
size off by a factor f has loss L* (1 + bend log(f)^2), where bend is the median curvature of the
budgets' parabolas relative to their minimum loss. The best model reaches that loss with compute C',
found by inverting the fitted law L(C), and the waste is 1 - C'/C.
"""

import dataclasses

import numpy as np

from paceline.core.plan import Estimate
from paceline.scaling.fits.all_methods import ScalingFit
from paceline.scaling.fits.isoflop import PowerLawFit
from paceline.scaling.surface import Array, tokens_for

WRONG_BY = (0.25, 0.5, 2.0, 4.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Waste:
    """FLOPs wasted by a model of a suboptimal size."""

    parameters: float
    reason: str
    wasted: float
    """Share of the FLOPs that the best model would have saved."""
    loss: float


def price_sizes(fit: ScalingFit, compute: float, best: Estimate) -> tuple[Waste, ...]:
    """Prices sizes around the `best` for `compute` FLOPs, using the chosen method."""
    sizes = [(factor * best.value, f"{factor:g} times the best N") for factor in WRONG_BY]
    sizes += [
        (end, f"the {name} end of the interval")
        for name, end in (("lower", best.low), ("upper", best.high))
        if end is not None
    ]
    parameters, reasons = zip(*sorted(sizes), strict=True)
    chosen = fit.chosen
    if isinstance(chosen, PowerLawFit):
        wasted, loss = _by_parabolas(fit, chosen, compute, np.array(parameters) / best.value)
    else:
        wasted = chosen.surface.wasted_compute(compute, parameters)
        loss = chosen.surface.loss(parameters, tokens_for(compute, parameters))
    return tuple(
        Waste(parameters=size, reason=reason, wasted=float(share), loss=float(its_loss))
        for size, reason, share, its_loss in zip(parameters, reasons, wasted, loss, strict=True)
    )


def _by_parabolas(
    fit: ScalingFit, chosen: PowerLawFit, compute: float, factors: Array
) -> tuple[Array, Array]:
    """Returns waste and loss of sizes off by `factors`; NaN if no budget has a parabola."""
    bends = [
        profile.coefficients[2] / profile.vertex_loss
        for profile in fit.profiles
        if profile.coefficients is not None and profile.vertex_loss
    ]
    least = chosen.optimum(np.array([compute]))[1]
    bend = float(np.median(bends)) if bends else np.nan
    loss = least * (1 + bend * np.log(factors) ** 2)
    saved = 1 - chosen.law.compute_for(loss) / compute
    return np.maximum(saved, 0.0), loss
