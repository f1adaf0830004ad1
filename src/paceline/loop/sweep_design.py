"""Chooses the runs of a sweep: buildable models, trained for whole steps.

Each level of FLOPs has several sizes, because the method that predicted held-out budgets of
published runs (a parabola at each level, see docs/scaling-laws.md) needs them. The lower levels
explore a wide range around the best size of published surfaces; the upper levels refine a narrow
range around the result.

Step Law (arXiv 2503.04715) gives the learning rate and batch of every run from parameters and
tokens. Its learning rate is taken at 20 tokens per parameter, so that it depends on N alone: a
longer run has a larger batch, which requires a higher rate, and more steps, which require a lower
one (arXiv 2409.19913); the two effects cancel.

The law was fitted to models of 60M parameters and more. A sweep therefore first varies the learning
rate around it, for a small model and for a larger one, and scales the law by the best factor. Then
it varies the batch, and scales the learning rate with the square root of the batch factor.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from paceline.accounting.counts import count_parameters, flops_per_token
from paceline.core.errors import UsageError
from paceline.core.finding import Finding
from paceline.core.plan import Estimate
from paceline.core.specs import ModelShape
from paceline.scaling.design import Posterior, learn_from
from paceline.scaling.model_shapes import (
    TOKENS_PER_PARAMETER,
    Ladder,
    ladder_shape,
    plain_ladder,
    step_law_batch_tokens,
    suggested_learning_rate,
)
from paceline.scaling.surface import compute_for
from paceline.scaling.sweep import Sweep

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


_NUM_LEVELS = 5
"""Number of levels of FLOPs, each half of the one above it."""
_NUM_EXPLORED = 3
"""Number of levels whose sizes are chosen before any loss is known."""
_EXPLORING = (3.0, 5)
"""Factor between the extreme sizes and the best one, and the number of sizes per level."""
_REFINING = (2.0, 5)
RATE, BATCH, FIT, FINAL = "rate", "batch", "fit", "final"
"""Purpose of a run: checking learning rates, checking batches, the fit, or the chosen model."""
CHECKS = (RATE, BATCH)
_LARGER = 2.0
"""Size of the larger model whose learning rate is checked, relative to the expected best."""
_TRIES = 4
_NEAR = math.log(1.5)
"""Largest acceptable deviation of a buildable size from the wanted one, as a log ratio."""
COST_OF_FIT: float = sum(
    (_EXPLORING if level < _NUM_EXPLORED else _REFINING)[1] / 2 ** (_NUM_LEVELS - 1 - level)
    for level in range(_NUM_LEVELS)
)
"""FLOPs of all runs of the fit, relative to one of the largest."""
COST_OF_LARGEST = COST_OF_FIT + sum(
    (1 + len(varied)) / 2 ** (_NUM_LEVELS - 1 - level)
    for level, varied in ((1, VARIED_RATES), (2, VARIED_RATES), (1, VARIED_BATCHES))
)
"""FLOPs of all runs including the checks, relative to one of the largest."""

_FEWEST_EXPLORING = 9
"""Fewest exploring runs, of 15, whose fit extrapolates.

Loops with 9 and 10 of them predicted held-out losses within 2%, a loop with 5 was off by 6%.
"""
_MORE_FLOPS = "give more FLOPs (--target of a sweep, --budget of a loop)"
_MOST_DOUBLINGS = 10

NUM_LATER = 1 + len(VARIED_BATCHES) + (_NUM_LEVELS - _NUM_EXPLORED) * _REFINING[1]
"""Number of runs that are planned after the losses of the first ones are known."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a sweep and a loop know about their models and their text."""

    vocab_size: int
    """Vocabulary of the models."""
    context_length: int
    """Tokens per sequence."""
    most_tokens: float | None = None
    """Maximum tokens of a run: the size of the dataset times the allowed epochs."""
    seed: int = 0
    """Seed of the initial weights and the data order."""
    ladder: Ladder | None = None
    """Models to choose from; None in directories of earlier versions, which had one ladder for a
    vocabulary and a context, whatever else the config said about the model."""


class SweepSpec(Limits, frozen=True, kw_only=True):
    """The target of a sweep, and its limits."""

    target: float
    """FLOPs for which to find the best model."""
    largest: float
    """FLOPs of the largest runs."""

    @property
    def levels(self) -> list[float]:
        """FLOPs per run at each level, in ascending order."""
        return [self.largest / 2**step for step in reversed(range(_NUM_LEVELS))]


class PlannedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run: a model, its training length, and its expected loss."""

    name: str
    """Name of the run and its directory; unique in a sweep."""
    purpose: str
    """One of rate, batch, fit and final."""
    shape: ModelShape
    is_whole_shape: bool = False
    """Whether `shape` holds rope_theta and norm_epsilon; runs that earlier versions planned have
    those of the preset."""
    steps: int
    batch_size: int
    learning_rate: float
    warmup_steps: int
    parameters: int
    """Exact number of parameters."""
    tokens: int
    """Tokens that the run trains on."""
    flops: float
    """Exact FLOPs, attention included."""
    seed: int = 0
    learning_rate_factor: float = 1.0
    """Factor relative to the rule, varied by the check."""
    batch_factor: float = 1.0
    """Factor relative to the rule, varied by the check."""
    expected_loss: Estimate | None = None
    """Loss predicted from earlier runs; None for the first ones."""

    @property
    def fitted_parameters(self) -> float:
        """The N that makes 6ND equal to the exact FLOPs; used in the fit."""
        return self.flops / float(compute_for(1.0, self.tokens))

    def first_steps(self, most: int) -> "PlannedRun":
        """Returns the same run, truncated to at most `most` steps."""
        steps = min(most, self.steps)
        return msgspec.structs.replace(
            self, steps=steps, warmup_steps=min(steps, self.warmup_steps)
        )


def rate_runs(spec: SweepSpec) -> list[PlannedRun]:
    """Returns runs of a small model and a larger one, each with several learning rates."""
    rules = [Rule(), *(Rule().varied(learning_rate=factor) for factor in VARIED_RATES)]
    runs = [
        planned_run(spec, "", RATE, shape, flops, rule)
        for shape, flops in _checked_models(spec)
        for rule in rules
    ]
    return _named(runs, 0, RATE)


def batch_runs(spec: SweepSpec, rule: Rule) -> list[PlannedRun]:
    """Returns runs of the small model with several batches, using the tuned learning rate."""
    shape, flops = _checked_models(spec)[0]
    rules = [rule, *(rule.varied(batch=factor) for factor in VARIED_BATCHES)]
    runs = [planned_run(spec, "", BATCH, shape, flops, each) for each in rules]
    return _named(runs, 0, BATCH)


def _checked_models(spec: SweepSpec) -> list[tuple[ModelShape, float]]:
    """Returns the models of the check with their FLOPs; skips a larger one that is not distinct."""
    surface = learn_from(None).surface
    small, large = spec.levels[1:3]
    best = float(surface.optimal_parameters(small))
    # If the best model is too small to be built, check the smallest buildable one.
    found = (find_shape(spec, best * math.exp(_NEAR * step)) for step in range(_TRIES))
    first = next((shape for shape in found if shape is not None), None)
    second = find_shape(spec, _LARGER * float(surface.optimal_parameters(large)))
    if first is None:
        raise UsageError(
            f"the smallest model with a vocabulary of {spec.vocab_size} is too large for runs "
            f"of {small:.3g} FLOPs; {_MORE_FLOPS}"
        )
    return [(first, small), *([] if second in (None, first) else [(second, large)])]


def exploring_runs(spec: SweepSpec, rule: Rule) -> list[PlannedRun]:
    """Returns the runs of the lower levels, which are planned before any loss is known."""
    levels = spec.levels[:_NUM_EXPLORED]
    runs = _runs(spec, learn_from(None), rule, levels, _EXPLORING)
    # No expected losses: published ones for other texts and vocabularies do not apply.
    return _named(runs, 0, FIT)


def require_sizes(spec: SweepSpec) -> None:
    """Raises if too few exploring runs are possible for a fit that extrapolates.

    With few FLOPs, the best models would be smaller than any that can be built, and all runs are on
    one side of the optimum. With little text, it is the small models that are missing.
    """
    num_runs = _num_possible(spec)
    if num_runs >= _FEWEST_EXPLORING:
        return
    for doublings in range(1, _MOST_DOUBLINGS):
        larger = msgspec.structs.replace(spec, largest=spec.largest * 2**doublings)
        if _num_possible(larger) >= _FEWEST_EXPLORING:
            remedy = f"give {2**doublings} times as many FLOPs (--budget, --exploration)"
            break
    else:
        remedy = "prepare more text, or raise --epochs"
    levels = spec.levels[:_NUM_EXPLORED]
    raise UsageError(
        f"only {num_runs} of {_NUM_EXPLORED * _EXPLORING[1]} small runs with {levels[0]:.2g} to "
        f"{levels[-1]:.2g} FLOPs are possible, too few sizes to extrapolate from; {remedy}"
    )


def _num_possible(spec: SweepSpec) -> int:
    """Returns the number of exploring runs that can be built and have enough text."""
    try:
        return len(exploring_runs(spec, Rule()))
    except UsageError:
        return 0


def first_runs(spec: SweepSpec) -> list[PlannedRun]:
    """Returns the runs that can be planned in advance; batches and refinement follow later."""
    return [*rate_runs(spec), *exploring_runs(spec, Rule())]


def refining_flops(spec: SweepSpec) -> float:
    """Returns the approximate FLOPs of the refining runs."""
    explored = sum(run.flops for run in exploring_runs(spec, Rule()))
    return COST_OF_FIT * spec.largest - explored


def refining_runs(spec: SweepSpec, rule: Rule, known: Sweep, num_before: int) -> list[PlannedRun]:
    """Returns the runs of the upper levels, around the best sizes of the `known` lower ones."""
    posterior = learn_from(known)
    runs = _runs(spec, posterior, rule, spec.levels[_NUM_EXPLORED:], _REFINING)
    expected = [
        msgspec.structs.replace(
            run, expected_loss=posterior.loss(run.fitted_parameters, run.tokens)
        )
        for run in runs
    ]
    return _named(expected, num_before, FIT)


def _named(runs: list[PlannedRun], num_before: int, purpose: str) -> list[PlannedRun]:
    """Returns runs with names assigned."""
    return [
        msgspec.structs.replace(run, name=f"{purpose}-{number:02d}")
        for number, run in enumerate(runs, start=num_before + 1)
    ]


def _runs(
    spec: SweepSpec,
    posterior: Posterior,
    rule: Rule,
    levels: Sequence[float],
    sizes: tuple[float, int],
) -> list[PlannedRun]:
    """Returns runs of distinct models at every level, in ascending order of size.

    Models that cannot be built, or that would exceed the token limit, are left out. Larger models
    do not replace them: a run with fewer tokens than parameters is uninformative.
    """
    reach, number = sizes
    step = reach ** (2 / (number - 1))
    found: list[PlannedRun] = []
    for flops in levels:
        best = float(posterior.surface.optimal_parameters(flops))
        here: dict[int, PlannedRun] = {}
        for size in best / reach * step ** np.arange(number):
            shape = find_shape(spec, float(size))
            if shape is None:
                continue
            run = planned_run(spec, "", FIT, shape, flops, rule)
            if spec.most_tokens is None or run.tokens <= spec.most_tokens:
                here[run.parameters] = run
        found += here.values()
    if not found:
        raise UsageError(
            f"no model with a vocabulary of {spec.vocab_size} can be trained with "
            f"{levels[0]:.3g} to {levels[-1]:.3g} FLOPs; {_MORE_FLOPS}, or more text"
        )
    return found


def find_shape(spec: SweepSpec, parameters: float) -> ModelShape | None:
    """Returns the buildable model nearest to an N of the fit; None if none is close enough.

    The N of the fit is a sixth of the FLOPs per token: it excludes embeddings and includes
    attention.
    """
    ladder = spec.ladder or plain_ladder(
        vocab_size=spec.vocab_size, context_length=spec.context_length
    )
    wanted = parameters
    for _ in range(_TRIES):
        try:
            shape = ladder_shape(wanted, ladder)
        except UsageError:
            return None
        found = flops_per_token(shape, spec.context_length).model / float(compute_for(1.0, 1.0))
        wanted = parameters * count_parameters(shape).total / found
    return shape if abs(math.log(found / parameters)) < _NEAR else None


def planned_run(
    spec: SweepSpec, name: str, purpose: str, shape: ModelShape, flops: float, rule: Rule
) -> PlannedRun:
    """Returns the run that spends `flops` on a model, in whole steps."""
    per_token = flops_per_token(shape, spec.context_length).model
    parameters = count_parameters(shape).total
    tuned = rule.apply(parameters, flops / per_token, spec.context_length)
    tokens = tuned.steps * tuned.batch_size * spec.context_length
    return PlannedRun(
        name=name,
        purpose=purpose,
        shape=shape,
        is_whole_shape=spec.ladder is not None,
        **dataclasses.asdict(tuned),
        parameters=parameters,
        tokens=tokens,
        flops=per_token * tokens,
        seed=spec.seed,
        learning_rate_factor=rule.learning_rate_factor,
        batch_factor=rule.batch_factor,
    )
