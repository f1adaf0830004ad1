"""Decides what to train with a budget, with intervals and the cost of a wrong size."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from paceline.core.errors import UsageError
from paceline.core.plan import Estimate
from paceline.core.specs import BatchShape
from paceline.scaling.allocation.model_shapes import (
    TrainingRun,
    nearest_shape,
    plan_run,
    suggested_batch_tokens,
    suggested_learning_rate,
)
from paceline.scaling.allocation.waste import Waste, price_sizes
from paceline.scaling.fits.all_methods import ScalingFit
from paceline.scaling.fits.bootstrap import MethodName
from paceline.scaling.fits.prediction import DEFAULT_LEVEL, predict
from paceline.scaling.fits.profile_likelihood import profile_interval


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """One method's answer for one budget."""

    method: MethodName
    compute: float
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
                compute=float(budget),
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
                waste=price_sizes(fit, chosen.compute, chosen.parameters),
                run=plan_run(shape, float(budget), batch),
                learning_rate=suggested_learning_rate(chosen.parameters.value, chosen.tokens.value),
            )
        )
    return decisions
