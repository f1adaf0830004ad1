"""The decision: what to train with a budget, how sure that is, and what being wrong costs."""

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
    """What to do with one budget."""

    compute: float
    """The budget in FLOPs."""
    extrapolation: float
    """The budget over the largest one that was tried."""
    answers: tuple[Answer, ...]
    """The answers of the methods that the runs allowed."""
    method: MethodName
    """The method that held at held-out budgets: its answer is the one to act on."""
    profile: Estimate | None
    """The parametric N once more, with its profile interval: the check on the bootstrap's."""
    waste: tuple[Waste, ...]
    """FLOPs that models too small or too large by some factors would throw away."""
    run: TrainingRun
    """That answer as something to train: a shape, its tokens and steps."""
    learning_rate: float
    """Peak learning rate to begin tuning at, by a published law."""


def decide(
    fit: ScalingFit,
    compute: Sequence[float],
    *,
    level: float = DEFAULT_LEVEL,
    vocab_size: int = 32_000,
    context_length: int = 2048,
    batch_tokens: int | None = None,
) -> list[Decision]:
    """Answers for every budget by every method, and plans the run of the one that held.

    Args:
        fit: What the methods make of the runs.
        compute: The budgets in FLOPs.
        level: Probability with which an interval is to hold the truth.
        vocab_size: Vocabulary of the model to build.
        context_length: Tokens per sequence of the model to build.
        batch_tokens: Tokens per step; by default what Step Law advises.
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
