"""Decides what to train with a budget, with intervals and the cost of a wrong size.

The cost is the fraction of its FLOPs that the best model would save. If the chosen method is a
surface, the surface prices every size. If it is a power law, a size off by a factor f has loss
L* (1 + bend log(f)^2), where bend is the median curvature of the budgets' parabolas relative to
their minimum loss. The best model reaches that loss with compute C', found by inverting the fitted
law L(C), and the waste is 1 - C'/C.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from paceline.core.errors import UsageError
from paceline.core.plan import Estimate
from paceline.core.specs import BatchShape
from paceline.scaling.fits.all_methods import ScalingFit
from paceline.scaling.fits.isoflop import PowerLawFit
from paceline.scaling.fits.prediction import DEFAULT_LEVEL, predict, profile_interval
from paceline.scaling.model_shapes import (
    TrainingRun,
    nearest_shape,
    plan_run,
    suggested_batch_tokens,
    suggested_learning_rate,
)
from paceline.scaling.surface import Array, tokens_for
from paceline.scaling.sweep import MethodName

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
        Waste(parameters=size, reason=reason, wasted=float(fraction), loss=float(its_loss))
        for size, reason, fraction, its_loss in zip(parameters, reasons, wasted, loss, strict=True)
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """One method's answer for one budget."""

    method: MethodName
    parameters: Estimate
    tokens: Estimate
    loss: Estimate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """The recommendation for one budget."""

    compute: float
    """The budget in FLOPs."""
    extrapolation: float
    """The budget divided by the largest budget in the sweep."""
    answers: tuple[Answer, ...]
    """One answer per method that could be fitted."""
    method: MethodName
    """The method that best predicted held-out budgets; act on its answer."""
    profile: Estimate | None
    """The parametric N with its profile interval, as a check on the bootstrap interval."""
    waste: tuple[Waste, ...]
    """FLOPs wasted by models that are too small or too large by given factors."""
    run: TrainingRun
    """The chosen answer as a concrete run: model shape, tokens and steps."""
    learning_rate: float
    """Peak learning rate from a published law, as a starting point for tuning."""


def decide(
    fit: ScalingFit,
    compute: Sequence[float],
    *,
    level: float = DEFAULT_LEVEL,
    vocab_size: int = 32_000,
    context_length: int = 2048,
    batch_tokens: int | None = None,
) -> list[Decision]:
    """Answers every budget with every method, and plans a run from the chosen method's answer.

    Args:
        fit: The fits of all methods.
        compute: The budgets in FLOPs.
        level: Coverage probability of the intervals.
        vocab_size: Vocabulary of the model to build.
        context_length: Tokens per sequence of the model to build.
        batch_tokens: Tokens per step; Step Law's suggestion by default.
    """
    targets = np.asarray(compute, dtype=np.float64)
    if not len(targets) or not (np.isfinite(targets) & (targets > 0)).all():
        raise UsageError("budgets must be positive numbers of FLOPs, such as 1e23")
    if not 0 < level < 1:
        raise UsageError(f"the level of intervals is {level:g}; it must lie between 0 and 1")
    predictions = [predict(method, targets, level) for method in fit.methods]
    decisions = []
    for index, budget in enumerate(targets):
        answers = tuple(
            Answer(
                method=prediction.method,
                parameters=prediction.parameters.at(index),
                tokens=prediction.tokens.at(index),
                loss=prediction.loss.at(index),
            )
            for prediction in predictions
        )
        (chosen,) = [answer for answer in answers if answer.method == fit.choice.method]
        shape = nearest_shape(
            chosen.parameters.value, vocab_size=vocab_size, context_length=context_length
        )
        tokens = batch_tokens or suggested_batch_tokens(chosen.tokens.value)
        num_sequences = max(1, round(tokens / context_length))
        batch = BatchShape(num_sequences=num_sequences, context_length=context_length)
        decisions.append(
            Decision(
                compute=float(budget),
                extrapolation=float(budget / fit.sweep.compute.max()),
                answers=answers,
                method=chosen.method,
                profile=profile_interval(fit.sweep, fit.parametric, float(budget), level)
                if fit.has_surface
                else None,
                waste=price_sizes(fit, float(budget), chosen.parameters),
                run=plan_run(shape, float(budget), batch),
                learning_rate=suggested_learning_rate(chosen.parameters.value, chosen.tokens.value),
            )
        )
    return decisions
