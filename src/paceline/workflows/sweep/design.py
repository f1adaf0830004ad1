"""Which runs a sweep makes: models that can be built, trained for whole steps.

Several sizes at every level of FLOPs, because the fit that held on published runs (a parabola at
each level, see docs/scaling-laws.md) needs them there. The lower levels are explored widely about
what published surfaces say of the best size; the upper ones closely about what the lower ones said.
"""

import dataclasses
import math
from collections.abc import Sequence

import msgspec
import numpy as np

from paceline.accounting.flops import flops_per_token
from paceline.accounting.parameters import count_parameters
from paceline.core.errors import UsageError
from paceline.core.plan import Estimate
from paceline.core.specs import ModelShape
from paceline.scaling.allocation.model_shapes import ladder_shape
from paceline.scaling.experiments.candidates import learn_from
from paceline.scaling.experiments.design import Belief
from paceline.scaling.runs.sweep import Sweep
from paceline.scaling.surface import compute_for
from paceline.workflows.sweep.rules import VARIED_BATCHES, VARIED_RATES, Rule

_NUM_LEVELS = 5
"""Levels of FLOPs, each half of the one above it."""
_NUM_EXPLORED = 3
"""Levels whose sizes are chosen before any loss is known."""
_EXPLORING = (3.0, 5)
"""How far sizes reach from the best one, as a factor, and their number at a level."""
_REFINING = (2.0, 5)
RATE, BATCH, FIT, FINAL = "rate", "batch", "fit", "final"
"""What a run is for: checking learning rates, checking batches, the fit, or the chosen model."""
CHECKS = (RATE, BATCH)
_LARGER = 2.0
"""Times the expected best size, for the larger model whose learning rate is checked."""
_TRIES = 4
_NEAR = math.log(1.5)
"""A model whose size is off by more is another one."""
COST_OF_FIT: float = sum(
    (_EXPLORING if level < _NUM_EXPLORED else _REFINING)[1] / 2 ** (_NUM_LEVELS - 1 - level)
    for level in range(_NUM_LEVELS)
)
"""FLOPs of all runs of the fit over those of one of the largest."""
COST_OF_LARGEST = COST_OF_FIT + sum(
    (1 + len(varied)) / 2 ** (_NUM_LEVELS - 1 - level)
    for level, varied in ((1, VARIED_RATES), (2, VARIED_RATES), (1, VARIED_BATCHES))
)
"""FLOPs of all runs, the check's included, over those of one of the largest."""


NUM_LATER = 1 + len(VARIED_BATCHES) + (_NUM_LEVELS - _NUM_EXPLORED) * _REFINING[1]
"""Runs that are planned when the first ones have told their losses."""


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What a sweep is to tell, and what it may cost."""

    target: float
    """FLOPs whose best model is wanted."""
    largest: float
    """FLOPs of the largest runs."""
    vocab_size: int
    """Vocabulary of the models."""
    context_length: int
    """Tokens of a sequence."""
    most_tokens: float | None = None
    """Tokens that a run may train on at most: the corpus, times the epochs that are allowed."""
    seed: int = 0
    """Seed of initial weights and the order of the data."""

    @property
    def levels(self) -> list[float]:
        """FLOPs that a run may take, from small to large."""
        return [self.largest / 2**step for step in reversed(range(_NUM_LEVELS))]


class PlannedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run: a model, how long it trains, and what is expected of it."""

    name: str
    """Unique in a sweep; the name of its directory."""
    purpose: str
    """One of rate, batch, fit and final."""
    shape: ModelShape
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
    """Varied by the check; 1 is the rule."""
    batch_factor: float = 1.0
    """Varied by the check; 1 is the rule."""
    expected_loss: Estimate | None = None
    """Loss that the runs before it let expect; None of the first ones."""

    @property
    def fitted_parameters(self) -> float:
        """N of the fit: what 6ND counts as the exact FLOPs."""
        return self.flops / float(compute_for(1.0, self.tokens))


def rate_runs(question: Question) -> list[PlannedRun]:
    """Returns a small model and a larger one, each with several learning rates."""
    rules = [Rule(), *(Rule().varied(learning_rate=factor) for factor in VARIED_RATES)]
    runs = [
        planned_run(question, "", RATE, shape, flops, rule)
        for shape, flops in _checked_models(question)
        for rule in rules
    ]
    return _named(runs, 0, RATE)


def batch_runs(question: Question, rule: Rule) -> list[PlannedRun]:
    """Returns the small model with several batches, at the learning rate that was found."""
    shape, flops = _checked_models(question)[0]
    rules = [rule, *(rule.varied(batch=factor) for factor in VARIED_BATCHES)]
    runs = [planned_run(question, "", BATCH, shape, flops, each) for each in rules]
    return _named(runs, 0, BATCH)


def _checked_models(question: Question) -> list[tuple[ModelShape, float]]:
    """Returns the models of the check with their FLOPs; the larger one only if it is another."""
    surface = learn_from(None).surface
    small, large = question.levels[1:3]
    best = float(surface.optimal_parameters(small))
    # Where the best model is too small to be built, the smallest one that can be is checked.
    found = (find_shape(question, best * math.exp(_NEAR * step)) for step in range(_TRIES))
    first = next((shape for shape in found if shape is not None), None)
    second = find_shape(question, _LARGER * float(surface.optimal_parameters(large)))
    if first is None:
        raise UsageError(
            f"the smallest model with a vocabulary of {question.vocab_size} is too large for runs "
            f"of {small:.3g} FLOPs; give a larger --target"
        )
    return [(first, small), *([] if second in (None, first) else [(second, large)])]


def exploring_runs(question: Question, rule: Rule) -> list[PlannedRun]:
    """Returns the runs that are made before any loss is known, on the lower levels."""
    levels = question.levels[:_NUM_EXPLORED]
    runs = _runs(question, learn_from(None), rule, levels, _EXPLORING)
    # What is published of other texts and vocabularies says nothing of this one's loss.
    return _named(runs, 0, FIT)


def first_runs(question: Question) -> list[PlannedRun]:
    """Returns the runs that can be named before any is made; batches and refinement follow."""
    return [*rate_runs(question), *exploring_runs(question, Rule())]


def refining_flops(question: Question) -> float:
    """Returns about how many FLOPs the runs take that refine what the first ones found."""
    explored = sum(run.flops for run in exploring_runs(question, Rule()))
    return COST_OF_FIT * question.largest - explored


def refining_runs(
    question: Question, rule: Rule, known: Sweep, num_before: int
) -> list[PlannedRun]:
    """Returns the runs of the upper levels, about the sizes that the lower ones favour.

    Args:
        question: What the sweep is to tell.
        rule: Learning rate and batch.
        known: The runs that have been made.
        num_before: How many runs have names already.
    """
    belief = learn_from(known)
    runs = _runs(question, belief, rule, question.levels[_NUM_EXPLORED:], _REFINING)
    expected = [
        msgspec.structs.replace(run, expected_loss=belief.loss(run.fitted_parameters, run.tokens))
        for run in runs
    ]
    return _named(expected, num_before, FIT)


def _named(runs: list[PlannedRun], num_before: int, purpose: str) -> list[PlannedRun]:
    """Returns runs with their names."""
    return [
        msgspec.structs.replace(run, name=f"{purpose}-{number:02d}")
        for number, run in enumerate(runs, start=num_before + 1)
    ]


def _runs(
    question: Question,
    belief: Belief,
    rule: Rule,
    levels: Sequence[float],
    sizes: tuple[float, int],
) -> list[PlannedRun]:
    """Returns runs of distinct models at every level, small ones first.

    Models that cannot be built, or would see the text too often, are left out. Larger ones do not
    take their place: a run with fewer tokens than parameters tells nothing of the best size.
    """
    reach, number = sizes
    step = reach ** (2 / (number - 1))
    found: list[PlannedRun] = []
    for flops in levels:
        best = float(belief.surface.optimal_parameters(flops))
        here: dict[int, PlannedRun] = {}
        for size in best / reach * step ** np.arange(number):
            shape = find_shape(question, float(size))
            if shape is None:
                continue
            run = planned_run(question, "", FIT, shape, flops, rule)
            if question.most_tokens is None or run.tokens <= question.most_tokens:
                here[run.parameters] = run
        found += here.values()
    if not found:
        raise UsageError(
            f"no model with a vocabulary of {question.vocab_size} can be trained with "
            f"{levels[0]:.3g} to {levels[-1]:.3g} FLOPs; give a larger --target, or more text"
        )
    return found


def find_shape(question: Question, parameters: float) -> ModelShape | None:
    """Returns the buildable model nearest to an N of the fit, if there is one near it.

    That N is a sixth of the FLOPs per token: embeddings are not in it, attention is.
    """
    wanted = parameters
    for _ in range(_TRIES):
        try:
            shape = ladder_shape(
                wanted, vocab_size=question.vocab_size, context_length=question.context_length
            )
        except UsageError:
            return None
        found = _fitted_parameters(shape, question.context_length)
        wanted = parameters * count_parameters(shape).total / found
    return shape if abs(math.log(found / parameters)) < _NEAR else None


def _fitted_parameters(shape: ModelShape, context_length: int) -> float:
    return flops_per_token(shape, context_length).model / float(compute_for(1.0, 1.0))


def planned_run(
    question: Question, name: str, purpose: str, shape: ModelShape, flops: float, rule: Rule
) -> PlannedRun:
    """Returns the run that spends so many FLOPs on a model, in whole steps."""
    per_token = flops_per_token(shape, question.context_length).model
    parameters = count_parameters(shape).total
    tuned = rule.apply(parameters, flops / per_token, question.context_length)
    tokens = tuned.steps * tuned.batch_size * question.context_length
    return PlannedRun(
        name=name,
        purpose=purpose,
        shape=shape,
        **dataclasses.asdict(tuned),
        parameters=parameters,
        tokens=tokens,
        flops=per_token * tokens,
        seed=question.seed,
        learning_rate_factor=rule.learning_rate_factor,
        batch_factor=rule.batch_factor,
    )
