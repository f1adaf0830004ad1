"""The learning rate and batch of every run of a sweep, and whether the rule holds.

Step Law (arXiv 2503.04715) gives both from parameters and tokens. Its learning rate is taken at 20
tokens per parameter, so that it depends on N alone: a longer run has a larger batch, which asks for
a higher rate, and more steps, which ask for a lower one (arXiv 2409.19913), and the two cancel.

The law was fitted to models of 60M parameters and more, so a sweep first varies the learning rate
about what it says, for a small model and for a larger one, and multiplies the law by what their
losses ask for. Then it varies the batch, with that learning rate times the root of the factor.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from paceline.core.finding import Finding
from paceline.scaling.allocation.model_shapes import step_law_batch_tokens, suggested_learning_rate

_WARMUP = 0.05
"""Part of a run in which the learning rate rises."""
_FEWEST_STEPS = 64
"""With fewer, a run is all warm-up and decay."""
VARIED_RATES = (0.125, 0.25, 0.5, 2.0)
"""Factors by which the check varies the learning rate; of small models the law's is too high."""
VARIED_BATCHES = (0.25, 0.5, 2.0)
"""Factors by which the check varies the batch."""
_POINTS = 3
_TOKENS_PER_PARAMETER = 20.0
_WORTH_SAYING = 0.005
"""Relative gain in loss from which a finding asks for a change."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """What is tuned in a run."""

    learning_rate: float
    """Peak learning rate."""
    batch_size: int
    """Sequences per step."""
    warmup_steps: int
    """Steps from zero to the peak."""
    steps: int
    """Steps of the run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """Step Law, times two factors."""

    learning_rate_factor: float = 1.0
    """What the law's learning rate is multiplied by."""
    batch_factor: float = 1.0
    """What the law's batch is multiplied by."""

    def apply(self, parameters: float, tokens: float, context_length: int) -> Hyperparameters:
        """Returns the hyperparameters of a run of so many parameters and about so many tokens."""
        by_law = step_law_batch_tokens(tokens)
        most = tokens / _FEWEST_STEPS
        batch_size = max(1, round(min(self.batch_factor * by_law, most) / context_length))
        steps = max(1, round(tokens / (batch_size * context_length)))
        # Adam's learning rate goes with the root of the batch (arXiv 2205.10287).
        for_batch = math.sqrt(batch_size * context_length / by_law)
        by_size = suggested_learning_rate(parameters, _TOKENS_PER_PARAMETER * parameters)
        return Hyperparameters(
            learning_rate=self.learning_rate_factor * for_batch * by_size,
            batch_size=batch_size,
            warmup_steps=min(steps, max(1, round(_WARMUP * steps))),
            steps=steps,
        )

    def varied(self, *, learning_rate: float = 1.0, batch: float = 1.0) -> "Rule":
        """Returns the rule with its factors multiplied."""
        return dataclasses.replace(
            self,
            learning_rate_factor=self.learning_rate_factor * learning_rate,
            batch_factor=self.batch_factor * batch,
        )


def rule_of_rates(best: Sequence[float]) -> Rule:
    """Returns the rule from the best factor of each model that was checked: their geometric mean.

    No power of N is made of them. Each is known to a factor of 1.5 at best, and a line through two
    sizes would reach the size of the final run several times as wrong.
    """
    return Rule(learning_rate_factor=statistics.geometric_mean(best))


def best_factor(losses: Mapping[float, float]) -> float:
    """Returns where the loss is lowest, from losses at three factors or more.

    A parabola through the lowest one and those next to it, in the logarithm of the factor; never
    beyond what was tried. Where it has no minimum, the factor of the lowest loss.
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
    """Says how the rule did in the check.

    Args:
        name: The finding's name.
        what: Learning rate or batch size, as a sentence names it.
        losses: Held-out loss by factor; factor 1 is the rule itself.
        factor: Where the loss is lowest.
        used: The factor of all other runs.
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
