"""The rule for the learning rate and batch of every run of a sweep, and its calibration.

Step Law (arXiv 2503.04715) gives both from parameters and tokens. Its learning rate is taken at 20
tokens per parameter, so that it depends on N alone: a longer run has a larger batch, which requires
a higher rate, and more steps, which require a lower one (arXiv 2409.19913); the two effects cancel.

The law was fitted to models of 60M parameters and more. A sweep therefore first varies the learning
rate around it, for a small model and for a larger one, and scales the law by the best factor. Then
it varies the batch, and scales the learning rate with the square root of the batch factor.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from paceline.core.finding import Finding
from paceline.scaling.model_shapes import (
    TOKENS_PER_PARAMETER,
    step_law_batch_tokens,
    suggested_learning_rate,
)

_WARMUP = 0.05
"""Share of a run's steps that is warm-up."""
_FEWEST_STEPS = 64
"""Minimum number of steps; a shorter run would be only warm-up and decay."""
VARIED_RATES = (0.125, 0.25, 0.5, 2.0)
"""Factors for the learning rate in the check; the law's is too high for small models."""
VARIED_BATCHES = (0.25, 0.5, 2.0)
"""Factors for the batch in the check."""
_POINTS = 3
_WORTH_SAYING = 0.005
"""Relative gain in loss above which a finding includes a remedy."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """The tuned hyperparameters of a run."""

    learning_rate: float
    """Peak learning rate."""
    batch_size: int
    """Sequences per step."""
    warmup_steps: int
    """Steps of linear warm-up to the peak."""
    steps: int
    """Total steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """Step Law, scaled by two factors."""

    learning_rate_factor: float = 1.0
    """Factor for the learning rate of the law."""
    batch_factor: float = 1.0
    """Factor for the batch of the law."""

    def apply(self, parameters: float, tokens: float, context_length: int) -> Hyperparameters:
        """Returns the hyperparameters of a run with `parameters` and about `tokens`."""
        by_law = step_law_batch_tokens(tokens)
        most = tokens / _FEWEST_STEPS
        batch_size = max(1, round(min(self.batch_factor * by_law, most) / context_length))
        steps = max(1, round(tokens / (batch_size * context_length)))
        # Adam's learning rate scales with the square root of the batch (arXiv 2205.10287).
        for_batch = math.sqrt(batch_size * context_length / by_law)
        by_size = suggested_learning_rate(parameters, TOKENS_PER_PARAMETER * parameters)
        return Hyperparameters(
            learning_rate=self.learning_rate_factor * for_batch * by_size,
            batch_size=batch_size,
            warmup_steps=min(steps, max(1, round(_WARMUP * steps))),
            steps=steps,
        )

    def varied(self, *, learning_rate: float = 1.0, batch: float = 1.0) -> "Rule":
        """Returns the rule with its factors multiplied by the given ones."""
        return dataclasses.replace(
            self,
            learning_rate_factor=self.learning_rate_factor * learning_rate,
            batch_factor=self.batch_factor * batch,
        )


def rule_of_rates(best: Sequence[float]) -> Rule:
    """Returns the rule with the geometric mean of the best factors of the checked models.

    No power law in N is fitted: each factor is known to within 1.5x at best, and extrapolating a
    line through two sizes to the final run would multiply that error.
    """
    return Rule(learning_rate_factor=statistics.geometric_mean(best))


def best_factor(losses: Mapping[float, float]) -> float:
    """Returns the factor with the lowest loss.

    Fits a parabola in the log of the factor through the lowest loss and its neighbours, and clamps
    the minimum to their range. Falls back to the factor of the lowest loss if there are fewer than
    three factors or the parabola has no minimum.
    """
    factors = sorted(losses)
    lowest = min(factors, key=losses.__getitem__)
    if len(factors) < _POINTS:
        return lowest
    first = min(max(factors.index(lowest) - 1, 0), len(factors) - _POINTS)
    near = factors[first : first + _POINTS]
    curve, slope, _ = np.polyfit([math.log(f) for f in near], [losses[f] for f in near], 2)
    if curve <= 0:
        return lowest
    best = math.exp(float(-slope / (2 * curve)))
    return min(max(best, near[0]), near[-1])


def rule_finding(
    name: str, what: str, losses: Mapping[float, float], factor: float, used: float
) -> Finding:
    """Returns a finding that describes how the rule performed in the check.

    `losses` are by factor, where 1 is the rule itself; `factor` is the best one, and `used` the one
    of all other runs.
    """
    rule_loss = losses[1.0]
    gain = 1 - min(losses.values()) / rule_loss
    tried = ", ".join(f"{losses[f]:.4f} at {f:g}x" for f in sorted(losses))
    message = f"{what} relative to Step Law: held-out loss {tried}; lowest at about {factor:.2g}x"
    remedy = ""
    if gain > _WORTH_SAYING:
        remedy = f"the other runs use {used:.2g}x Step Law; the best loss here is {gain:.1%} lower"
    return Finding(
        name=name, message=message, remedy=remedy, figures={"factor": factor, "gain": gain}
    )
