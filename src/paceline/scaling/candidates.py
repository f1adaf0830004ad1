"""Candidate runs, their costs, and the choice of which to train next.

Any object with parameters, tokens and a cost is a candidate: `candidate_runs` builds a grid of
them, `read_candidates` reads them from a file, and a training service can define its own type.
The budget has the unit of the costs, which are FLOPs unless a price function is given.
"""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np

from paceline.core.errors import UsageError
from paceline.scaling.design import Posterior, choose, learn, published_prior
from paceline.scaling.readers import read_rows
from paceline.scaling.surface import tokens_for
from paceline.scaling.sweep import Sweep, positive_number, run_size

Price = Callable[[float, float], float]
"""The cost of a run from its parameters and tokens."""

EXPECTED_NOISE = 0.003
# Runs below this fraction of the target are cheap, but real ones no longer lie on the same surface.
# Neither do models that are further than REACH from the best size for their FLOPs.
FARTHEST_BELOW = 1e-4
REACH = 8.0
_NUM_SIZES = 17
_STEPS_OF_A_DECADE = (1.0, 3.0, 6.0)
# Runs stop at whole steps and models have whole layers: runs this close count as the same run.
_SAME_RUN = 0.01


class Candidate(Protocol):
    """A run that could be trained."""

    @property
    def parameters(self) -> float:
        """N."""

    @property
    def tokens(self) -> float:
        """D."""

    @property
    def cost(self) -> float:
        """Cost of the run, in the unit of the budget."""


_Candidate = TypeVar("_Candidate", bound=Candidate)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CandidateRun:
    """A candidate with only size, tokens and cost."""

    parameters: float
    """N."""
    tokens: float
    """D."""
    cost: float
    """Cost of the run, in the unit of the budget."""


def candidate_runs(
    target: float,
    known: Sweep | None = None,
    *,
    flops: Sequence[float] = (),
    sizes: Sequence[float] = (),
    price: Price | None = None,
) -> list[CandidateRun]:
    """Returns a grid of candidates: for each number of FLOPs, sizes around the best one.

    Args:
        target: The FLOPs at which to determine the best model.
        known: Runs already trained; they determine where the best sizes lie.
        flops: Allowed FLOPs per run; 1, 3 and 6 per decade from 1e-4 of the target by default.
        sizes: Allowed parameter counts; by default 17 within a factor of 8 of the best.
        price: The cost of a run from its parameters and tokens; its FLOPs, 6ND, by default.
    """
    surface = learn_from(known).surface
    candidates = []
    for compute in flops or _ladder(target):
        best = float(surface.optimal_parameters(compute))
        ladder = sizes or (best * np.geomspace(1 / REACH, REACH, _NUM_SIZES)).tolist()
        for size in ladder:
            if not is_near(size, best):
                continue
            tokens = float(tokens_for(compute, size))
            cost = compute if price is None else price(size, tokens)
            candidates.append(CandidateRun(parameters=size, tokens=tokens, cost=cost))
    return candidates


def read_candidates(path: pathlib.Path) -> list[CandidateRun]:
    """Reads candidates from a file: runs without a loss; `cost` defaults to 6ND."""
    candidates = []
    for number, row in enumerate(read_rows(path), start=1):
        where = f"{path}: row {number}"
        parameters, tokens, compute = run_size(row, where)
        cost = positive_number(row, "cost", where) if "cost" in row else compute
        candidates.append(CandidateRun(parameters=parameters, tokens=tokens, cost=cost))
    return candidates


def propose_runs(
    known: Sweep | None, candidates: Sequence[_Candidate], *, budget: float, target: float
) -> list[_Candidate]:
    """Returns the candidates to run within a budget, in the order of selection.

    Args:
        known: Runs already trained.
        candidates: Runs that could be trained; known runs among them are skipped.
        budget: Limit on the total cost, in the unit of the candidates' costs.
        target: The FLOPs at which to determine the best model.
    """
    require_target(target)
    new = [run for run in candidates if known is None or not _is_known(run, known)]
    if not any(run.cost <= budget for run in new):
        least = min((run.cost for run in new), default=math.nan)
        raise UsageError(
            f"a budget of {budget:g} buys no run: the cheapest of {len(new)} candidates costs "
            f"{least:g}; spend more, aim lower than {target:g} FLOPs, or give other candidates"
        )
    parameters, tokens, cost = np.array(
        [(run.parameters, run.tokens, run.cost) for run in new], dtype=np.float64
    ).T
    chosen = choose(learn_from(known), parameters, tokens, cost, target, budget)
    return [new[index] for index in chosen]


def learn_from(known: Sweep | None) -> Posterior:
    """Returns the posterior about the surface from known runs, or the prior without any."""
    if known is None:
        return published_prior(EXPECTED_NOISE)
    return learn(known.parameters, known.tokens, known.loss, EXPECTED_NOISE)


def is_near(parameters: float, best: float) -> bool:
    """Returns whether a size is close enough to the best for its FLOPs to be informative."""
    # The tolerance keeps the ends of a ladder in spite of rounding.
    return abs(math.log(parameters / best)) <= math.log(REACH) + 1e-9


def require_target(target: float) -> None:
    """Raises an error unless the target is positive and finite."""
    if not (math.isfinite(target) and target > 0):
        raise UsageError(f"a target of {target:g} FLOPs; it must be positive, such as 1e19")


def _ladder(target: float) -> list[float]:
    require_target(target)
    last = math.floor(math.log10(target))
    first = last + round(math.log10(FARTHEST_BELOW)) - 1
    steps = [
        digit * 10.0**power for power in range(first, last + 1) for digit in _STEPS_OF_A_DECADE
    ]
    return [flops for flops in steps if FARTHEST_BELOW * target <= flops <= target]


def _is_known(run: Candidate, known: Sweep) -> bool:
    sizes, tokens = np.log(known.parameters / run.parameters), np.log(known.tokens / run.tokens)
    return bool(((np.abs(sizes) < _SAME_RUN) & (np.abs(tokens) < _SAME_RUN)).any())
