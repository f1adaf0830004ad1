"""Which run to buy next: the one that most reduces the variance of the predicted optimum per FLOP.

What is known of the surface is a normal distribution about the most probable one: a broad prior
from published fits, and the runs bought so far. A run that is not yet bought adds a known amount
of information, whatever its loss will be, so the variance of log N at the target after buying it
is known before. Runs far off the optimum tell little of it, tiny ones are cheap but far from the
target; both weigh themselves.
"""

import dataclasses

import numpy as np

from paceline.core.errors import UsageError
from paceline.scaling.surface import Array, LossSurface, compute_for

# Terms are counted at this size and these tokens, where they are of the order of one.
_REFERENCE = (1e8, 2e9)
# E, log of both terms at the reference, and both exponents: centres and deviations that hold every
# published surface of text.
_PRIOR_MEAN = np.array([2.0, -0.3, 0.34, -0.3, 0.34])
_PRIOR_DEVIATION = np.array([1.0, 0.8, 0.08, 0.8, 0.08])
_MAX_STEPS = 50
_NOISE_ROUNDS = 3
# Losses are printed with so many digits; less noise than that would make the algebra singular.
_LEAST_NOISE = 1e-5
_THRIFT = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Belief:
    """What is known of a surface: its coefficients and their covariance."""

    mean: Array
    covariance: Array
    noise: float
    """Relative deviation of a run's loss."""

    @property
    def surface(self) -> LossSurface:
        """The most probable surface."""
        floor, log_p, alpha, log_q, beta = (float(value) for value in self.mean)
        return LossSurface(
            irreducible=max(floor, 0.0),
            parameter_scale=float(np.exp(log_p + alpha * np.log(_REFERENCE[0]))),
            parameter_exponent=alpha,
            token_scale=float(np.exp(log_q + beta * np.log(_REFERENCE[1]))),
            token_exponent=beta,
        )

    def log_size_deviation(self, compute: float) -> float:
        """Returns the standard deviation of log N at a budget."""
        slope = _optimum_slope(self.mean, compute)
        return float(np.sqrt(max(float(slope @ self.covariance @ slope), 0.0)))


def prior_belief(noise: float) -> Belief:
    """Returns what is known before any run."""
    return Belief(mean=_PRIOR_MEAN, covariance=np.diag(_PRIOR_DEVIATION**2), noise=noise)


def learn(parameters: Array, tokens: Array, loss: Array, noise: float) -> Belief:
    """Returns what runs and the prior together say of the surface.

    The noise is that of the residuals once there are enough of them, and `noise` before.
    """
    mean = _PRIOR_MEAN
    precision = np.diag(_PRIOR_DEVIATION**-2.0)
    for _ in range(_NOISE_ROUNDS):
        mean, information, residual = _most_probable(parameters, tokens, loss, noise)
        freedom = len(loss) - len(mean)
        if freedom >= len(mean):
            noise = max(float(np.sqrt((residual**2).sum() / freedom)), _LEAST_NOISE)
    covariance = np.asarray(np.linalg.inv(precision + information), dtype=np.float64)
    return Belief(mean=mean, covariance=covariance, noise=noise)


def variance_reductions(belief: Belief, parameters: Array, tokens: Array, compute: float) -> Array:
    """Returns by how much each run would reduce the variance of log N at a budget."""
    slopes = _log_loss_slopes(belief.mean, parameters, tokens)
    spread = slopes @ belief.covariance
    total = belief.noise**2 + np.einsum("ni,ni->n", spread, slopes)
    return np.asarray((spread @ _optimum_slope(belief.mean, compute)) ** 2 / total)


def after_buying(belief: Belief, parameters: float, tokens: float) -> Belief:
    """Returns what will be known after a run, as far as that is known before."""
    slope = _log_loss_slopes(belief.mean, np.array([parameters]), np.array([tokens]))[0]
    spread = belief.covariance @ slope
    covariance = belief.covariance - np.outer(spread, spread) / (belief.noise**2 + slope @ spread)
    return dataclasses.replace(belief, covariance=covariance)


def choose(
    belief: Belief, parameters: Array, tokens: Array, cost: Array, compute: float, budget: float
) -> list[int]:
    """Returns the candidates to buy with a budget, in the order in which they are chosen.

    One after the other, the candidate is taken that most reduces the variance of log N at
    `compute`, given those before it, per FLOP raised to a power. Several powers are tried, from
    spending lavishly to spending thriftily, and the plan that leaves the least variance is kept.
    """
    if not (len(parameters) == len(tokens) == len(cost)):
        raise UsageError("candidates need parameters, tokens and a cost each")
    plans = [
        _greedy(belief, parameters, tokens, cost, compute, budget, thrift) for thrift in _THRIFT
    ]
    return min(plans, key=lambda plan: plan[1])[0]


def _greedy(
    belief: Belief,
    parameters: Array,
    tokens: Array,
    cost: Array,
    compute: float,
    budget: float,
    thrift: float,
) -> tuple[list[int], float]:
    chosen: list[int] = []
    is_open = np.ones(len(cost), dtype=bool)
    while True:
        is_open &= cost <= budget
        if not is_open.any():
            return chosen, belief.log_size_deviation(compute)
        gain = variance_reductions(belief, parameters, tokens, compute)
        best = int(np.where(is_open, gain / cost**thrift, -1.0).argmax())
        chosen.append(best)
        is_open[best] = False
        budget -= float(cost[best])
        belief = after_buying(belief, float(parameters[best]), float(tokens[best]))


def _terms(mean: Array, parameters: Array, tokens: Array) -> tuple[Array, Array, Array, Array]:
    log_n, log_d = np.log(parameters / _REFERENCE[0]), np.log(tokens / _REFERENCE[1])
    return np.exp(mean[1] - mean[2] * log_n), np.exp(mean[3] - mean[4] * log_d), log_n, log_d


def _log_loss_slopes(mean: Array, parameters: Array, tokens: Array) -> Array:
    by_n, by_d, log_n, log_d = _terms(mean, parameters, tokens)
    columns = [np.ones_like(by_n), by_n, -by_n * log_n, by_d, -by_d * log_d]
    return np.asarray(np.stack(columns, axis=1) / (mean[0] + by_n + by_d)[:, None])


def _optimum_slope(mean: Array, compute: float) -> Array:
    """Returns the slopes of log N at a budget along the coefficients."""
    _, log_p, alpha, log_q, beta = mean
    total = alpha + beta
    budget = np.log(compute / compute_for(*_REFERENCE))
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


def _most_probable(
    parameters: Array, tokens: Array, loss: Array, noise: float
) -> tuple[Array, Array, Array]:
    """Finds the most probable coefficients by damped Gauss-Newton steps."""
    mean, damping = _PRIOR_MEAN.copy(), 1e-3

    def state(at: Array) -> tuple[float, Array]:
        by_n, by_d, _, _ = _terms(at, parameters, tokens)
        with np.errstate(invalid="ignore"):
            residual = np.log(loss) - np.log(at[0] + by_n + by_d)
        if not (np.isfinite(residual).all() and min(at[2], at[4]) > 0 and at[0] >= 0):
            return np.inf, residual
        penalty = ((at - _PRIOR_MEAN) / _PRIOR_DEVIATION) ** 2
        return float((residual**2).sum() / noise**2 + penalty.sum()), residual

    objective, residual = state(mean)
    for _ in range(_MAX_STEPS):
        slopes = _log_loss_slopes(mean, parameters, tokens) / noise
        curvature = slopes.T @ slopes + np.diag(_PRIOR_DEVIATION**-2.0)
        gradient = slopes.T @ residual / noise - (mean - _PRIOR_MEAN) / _PRIOR_DEVIATION**2
        damped = curvature + damping * np.diag(np.diag(curvature))
        candidate = mean + np.linalg.solve(damped, gradient)
        reached, new_residual = state(candidate)
        if reached <= objective:
            is_still = objective - reached < 1e-9 * objective
            mean, objective, residual = candidate, reached, new_residual
            damping = max(damping / 5, 1e-12)
            if is_still:
                break
        else:
            damping *= 10
            if damping > 1e12:
                break
    slopes = _log_loss_slopes(mean, parameters, tokens) / noise
    return mean, slopes.T @ slopes, residual
