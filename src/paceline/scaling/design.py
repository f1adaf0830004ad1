"""Candidate runs, and the choice of those that most reduce the variance of the optimum per FLOP.

The posterior about the surface is a normal distribution around the most probable one: a broad prior
from published fits, updated with the runs so far. A planned run adds a known amount of information
regardless of its loss, so the variance of log N at the target after the run is known in advance.
Runs far from the optimum carry little information about it; tiny runs are cheap but far from the
target. The criterion weighs both effects automatically.

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

from paceline.accounting.intervals import NORMAL_90
from paceline.core.errors import UsageError
from paceline.core.plan import Estimate
from paceline.scaling.fits.least_squares import Linearization, Rows, minimize
from paceline.scaling.readers import read_rows
from paceline.scaling.surface import Array, LossSurface, compute_for, tokens_for
from paceline.scaling.sweep import Sweep, positive_number, run_size

# N and D at which the two reducible terms are parameterised; both terms are of order one there.
REFERENCE = (1e8, 2e9)
# E, log of both terms at the reference, and both exponents: means and deviations that cover every
# published surface for text.
_PRIOR_MEAN = np.array([2.0, -0.3, 0.34, -0.3, 0.34])
_PRIOR_DEVIATION = np.array([1.0, 0.8, 0.08, 0.8, 0.08])
# Published surfaces use vocabularies of 32k and more. For bytes, both terms are a twentieth as
# large at the same N and D, so the prior lets the data shift both terms together by e^3. A tighter
# prior would be compensated by exponents and an E that are too small, and predictions for larger
# models would always be too optimistic.
_TERMS_DEVIATION = 3.0
_P, _Q = 1, 3
"""Indices of the N and D terms among the coefficients."""
# No negative loss, no term that grows with N or D.
_BOUNDS = np.array([0.0, -np.inf, 1e-3, -np.inf, 1e-3]), np.full(5, np.inf)
_MAX_STEPS = 50
_CONVERGED_GAIN = 1e-9
_LARGEST_STEP = 2.0
_NOISE_ROUNDS = 3
# The precision of printed losses; less noise than this would make the matrices singular.
_LEAST_NOISE = 1e-5
_THRIFT = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Posterior:
    """The distribution of a surface given runs: mean and covariance of its coefficients."""

    mean: Array
    covariance: Array
    noise: float
    """Relative standard deviation of a run's loss."""

    @property
    def surface(self) -> LossSurface:
        """The most probable surface."""
        return _surface(self.mean)

    def best_parameters(self, compute: float) -> Estimate:
        """Returns the best N for a budget, with its 90% interval."""
        size = float(self.surface.optimal_parameters(compute))
        factor = float(np.exp(NORMAL_90 * self.log_size_deviation(compute)))
        return Estimate(value=size, low=size / factor, high=size * factor)

    def best_loss(self, compute: float) -> Estimate:
        """Returns the loss of the best model for a budget, with the 90% interval of one run."""
        size = float(self.surface.optimal_parameters(compute))
        return self.loss(size, float(tokens_for(compute, size)))

    def log_size_deviation(self, compute: float) -> float:
        """Returns the standard deviation of log N at a budget."""
        slope = _optimum_slope(self.mean, compute)
        return float(np.sqrt(max(float(slope @ self.covariance @ slope), 0.0)))

    def loss(self, parameters: float, tokens: float) -> Estimate:
        """Returns the predicted loss of a run, with its 90% interval."""
        value = float(self.surface.loss(parameters, tokens))
        size = np.array([parameters]), np.array([tokens])
        slope = self.surface.log_slopes(*size, REFERENCE)[0]
        deviation = float(np.sqrt(self.noise**2 + max(float(slope @ self.covariance @ slope), 0.0)))
        spread = float(np.exp(NORMAL_90 * deviation))
        return Estimate(value=value, low=value / spread, high=value * spread)


def published_prior(noise: float) -> Posterior:
    """Returns the distribution before any run, which covers published surfaces for text."""
    return Posterior(mean=_PRIOR_MEAN, covariance=np.diag(_PRIOR_DEVIATION**2), noise=noise)


def learn(parameters: Array, tokens: Array, loss: Array, noise: float) -> Posterior:
    """Returns the posterior after combining the prior with runs.

    The noise is estimated from the residuals if there are enough runs; otherwise it is `noise`.
    """
    mean = _PRIOR_MEAN
    prior = _prior_observations()
    for _ in range(_NOISE_ROUNDS):
        mean, information, residual = _most_probable(parameters, tokens, loss, noise)
        freedom = len(loss) - len(mean)
        if freedom >= len(mean):
            noise = max(float(np.sqrt((residual**2).sum() / freedom)), _LEAST_NOISE)
    covariance = np.asarray(np.linalg.inv(prior.T @ prior + information), dtype=np.float64)
    return Posterior(mean=mean, covariance=covariance, noise=noise)


def variance_reductions(posterior: Posterior, slopes: Array, compute: float) -> Array:
    """Returns the reduction of the variance of log N at a budget by each candidate run.

    `slopes` are the derivatives of each run's log loss with respect to the coefficients.
    """
    spread = slopes @ posterior.covariance
    total = posterior.noise**2 + np.einsum("ni,ni->n", spread, slopes)
    return np.asarray((spread @ _optimum_slope(posterior.mean, compute)) ** 2 / total)


def after_buying(posterior: Posterior, parameters: float, tokens: float) -> Posterior:
    """Returns the posterior after a planned run: a smaller covariance with the same mean."""
    run = np.array([parameters]), np.array([tokens])
    return _after(posterior, posterior.surface.log_slopes(*run, REFERENCE)[0])


def choose(
    posterior: Posterior,
    parameters: Array,
    tokens: Array,
    cost: Array,
    compute: float,
    budget: float,
) -> list[int]:
    """Returns the indices of the candidates to buy within a budget, in the order of selection.

    Candidates are selected greedily: each one maximises the reduction of the variance of log N at
    `compute`, given the previous ones, per cost raised to a power. Several powers are tried, from
    0 (ignore the cost) to 1, and the plan that leaves the least variance is returned.
    """
    slopes = posterior.surface.log_slopes(parameters, tokens, REFERENCE)
    plans = [_greedy(posterior, slopes, cost, compute, budget, thrift) for thrift in _THRIFT]
    return min(plans, key=lambda plan: plan[1])[0]


def _greedy(
    posterior: Posterior, slopes: Array, cost: Array, compute: float, budget: float, thrift: float
) -> tuple[list[int], float]:
    """Returns the candidates of one plan, and the remaining deviation of log N."""
    chosen: list[int] = []
    price = cost**thrift
    is_open = np.ones(len(cost), dtype=bool)
    while True:
        is_open &= cost <= budget
        if not is_open.any():
            return chosen, posterior.log_size_deviation(compute)
        gain = variance_reductions(posterior, slopes, compute)
        best = int(np.where(is_open, gain / price, -1.0).argmax())
        chosen.append(best)
        is_open[best] = False
        budget -= float(cost[best])
        posterior = _after(posterior, slopes[best])


def _after(posterior: Posterior, slope: Array) -> Posterior:
    spread = posterior.covariance @ slope
    covariance = posterior.covariance - np.outer(spread, spread) / (
        posterior.noise**2 + slope @ spread
    )
    return dataclasses.replace(posterior, covariance=covariance)


def _optimum_slope(mean: Array, compute: float) -> Array:
    """Returns the derivatives of log N at a budget with respect to the coefficients."""
    _, log_p, alpha, log_q, beta = mean
    total = alpha + beta
    budget = np.log(compute / compute_for(*REFERENCE))
    log_size = (np.log(alpha / beta) + log_p - log_q + beta * budget) / total
    return np.array(
        [
            0.0,
            1 / total,
            (1 / alpha - log_size) / total,
            -1 / total,
            (budget - 1 / beta - log_size) / total,
        ]
    )


def _prior_observations() -> Array:
    """Returns the prior as five pseudo-observations, one row of slopes each.

    They constrain E, both exponents, the ratio of the two terms and, loosely, their level.
    """
    rows = np.diag(1 / _PRIOR_DEVIATION)
    rows[_P, [_P, _Q]] = 1 / np.hypot(*_PRIOR_DEVIATION[[_P, _Q]]) * np.array([1.0, -1.0])
    rows[_Q, [_P, _Q]] = 0.5 / _TERMS_DEVIATION
    return rows


def _most_probable(
    parameters: Array, tokens: Array, loss: Array, noise: float
) -> tuple[Array, Array, Array]:
    """Returns the most probable coefficients, the runs' information on them, and the residuals."""
    prior = _prior_observations()

    def residual_and_slopes(mean: Array) -> tuple[Array, Array]:
        surface = _surface(mean)
        residual = np.log(loss / surface.loss(parameters, tokens))
        return residual / noise, surface.log_slopes(parameters, tokens, REFERENCE) / noise

    def linearize(means: Array, _rows: Rows) -> Linearization:
        residual, slopes = residual_and_slopes(means[0])
        residual = np.append(residual, prior @ (_PRIOR_MEAN - means[0]))[None]
        slopes = np.append(slopes, prior, axis=0)
        return Linearization(
            residual=residual,
            slopes=slopes.T[None],
            weights=np.ones_like(residual),
            objective=(residual**2).sum(axis=1),
        )

    found = minimize(
        _PRIOR_MEAN[None],
        linearize,
        bounds=_BOUNDS,
        max_steps=_MAX_STEPS,
        gain_tolerance=_CONVERGED_GAIN,
        largest_step=_LARGEST_STEP,
    )
    mean = found.coefficients[0]
    residual, slopes = residual_and_slopes(mean)
    return mean, slopes.T @ slopes, noise * residual


def _surface(mean: Array) -> LossSurface:
    floor, log_p, alpha, log_q, beta = (float(value) for value in mean)
    scale_n = np.exp(log_p + alpha * np.log(REFERENCE[0]))
    scale_d = np.exp(log_q + beta * np.log(REFERENCE[1]))
    return LossSurface(floor, float(scale_n), alpha, float(scale_d), beta)


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
