"""Tests that designs are the most informative for their cost, for any candidates and prices."""

import math
import pathlib

import numpy as np
import pytest

from paceline.core.errors import UsageError
from paceline.scaling import (
    CandidateRun,
    LossSurface,
    Sweep,
    SweepDesign,
    candidate_runs,
    propose_runs,
    synthetic_sweep,
)
from paceline.scaling.design import (
    REFERENCE,
    Posterior,
    after_buying,
    choose,
    learn,
    published_prior,
    read_candidates,
    variance_reductions,
)
from paceline.scaling.surface import tokens_for


def test_proposals_spend_the_budget_and_no_more() -> None:
    runs = propose_runs(None, candidate_runs(1e19), budget=2e18, target=1e19)
    assert 1.9e18 < sum(run.cost for run in runs) <= 2e18
    assert len({(run.parameters, run.tokens) for run in runs}) == len(runs)
    with pytest.raises(UsageError, match="buys no run: the cheapest of 221 candidates costs 1e"):
        propose_runs(None, candidate_runs(1e19), budget=1e12, target=1e19)
    with pytest.raises(UsageError, match="a target of nan FLOPs"):
        candidate_runs(math.nan)


def test_the_grid_is_about_the_best_sizes_from_a_ten_thousandth_to_the_target(
    surface: LossSurface,
) -> None:
    known = synthetic_sweep(surface, SweepDesign(budgets=(1e17, 3e17, 1e18)))
    runs = candidate_runs(1e19, known)
    flops = sorted({round(math.log10(run.cost), 6) for run in runs})
    assert (flops[0], flops[-1], len(flops)) == (15, 19, 13)
    for run in runs:
        assert 6 * run.parameters * run.tokens == pytest.approx(run.cost)
        ratio = run.parameters / float(surface.optimal_parameters(run.cost))
        assert 1 / 8.5 < ratio < 8.5


def test_sizes_flops_and_price_are_the_users() -> None:
    def hours(parameters: float, tokens: float) -> float:
        return 6 * parameters * tokens / 1e15 + 10.0  # Every run has a fixed start-up cost.

    runs = candidate_runs(1e19, flops=(1e16, 1e17), sizes=(1e7, 3e7, 1e12), price=hours)
    # The last size is far from the optimum of either budget, so it is uninformative.
    assert {run.parameters for run in runs} == {1e7, 3e7}
    assert sorted({run.cost for run in runs}) == pytest.approx([20.0, 110.0])
    chosen = propose_runs(None, runs, budget=45.0, target=1e19)
    assert [run.cost for run in chosen] == pytest.approx([20.0, 20.0])


def test_a_price_changes_what_is_chosen() -> None:
    by_flops = candidate_runs(1e19)
    by_count = candidate_runs(1e19, price=lambda _parameters, _tokens: 1.0)
    cheap = propose_runs(None, by_flops, budget=3e17, target=1e19)
    few = propose_runs(None, by_count, budget=len(cheap), target=1e19)
    assert len(few) == len(cheap)
    # At equal cost, large runs are more informative about the target than small ones.
    largest = [max(6 * run.parameters * run.tokens for run in runs) for runs in (cheap, few)]
    assert largest[1] > 10 * largest[0]


def test_candidates_from_a_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "candidates.csv"
    path.write_text("parameters,compute_budget,cost\n1e7,6e16,3\n4e7,2.4e17,11\n")
    assert read_candidates(path) == [
        CandidateRun(parameters=1e7, tokens=1e9, cost=3.0),
        CandidateRun(parameters=4e7, tokens=1e9, cost=11.0),
    ]
    path.write_text("parameters,tokens\n1e7,1e9\n")
    assert read_candidates(path)[0].cost == pytest.approx(6e16)
    path.write_text("parameters,tokens,cost\n1e7,1e9,-1\n")
    with pytest.raises(UsageError, match=r"candidates.csv: row 1: cost is -1"):
        read_candidates(path)


def test_known_runs_are_not_made_again(surface: LossSurface) -> None:
    candidates = candidate_runs(1e19)
    first = propose_runs(None, candidates, budget=2e17, target=1e19)
    parameters = np.array([run.parameters for run in first])
    tokens = np.array([run.tokens for run in first])
    known = Sweep(
        # Real runs deviate slightly: models have whole layers, and runs have whole steps.
        parameters=1.002 * parameters,
        tokens=0.998 * tokens,
        compute=6 * parameters * tokens,
        loss=surface.loss(parameters, tokens),
    )
    again = propose_runs(known, candidates, budget=2e17, target=1e19)
    assert again
    assert not set(first) & set(again)


def test_the_variance_falls_as_foretold() -> None:
    posterior = published_prior(0.003)
    sizes, budgets = np.array([3e7, 1e8, 3e6]), np.array([1e17, 3e17, 1e16])
    tokens = tokens_for(budgets, sizes)
    slopes = posterior.surface.log_slopes(sizes, tokens, REFERENCE)
    foretold = variance_reductions(posterior, slopes, 1e19)
    for index in range(3):
        after = after_buying(posterior, float(sizes[index]), float(tokens[index]))
        fallen = posterior.log_size_deviation(1e19) ** 2 - after.log_size_deviation(1e19) ** 2
        assert fallen == pytest.approx(foretold[index], rel=1e-6)
        assert fallen > 0


def test_the_slope_of_the_optimum_is_its_derivative() -> None:
    posterior = published_prior(0.003)
    best = math.log(float(posterior.surface.optimal_parameters(1e19)))
    deviation = posterior.log_size_deviation(1e19)
    squares = 0.0
    for index in range(5):
        step = 1e-6
        mean = posterior.mean.copy()
        mean[index] += step
        moved = Posterior(mean=mean, covariance=posterior.covariance, noise=posterior.noise)
        slope = (math.log(float(moved.surface.optimal_parameters(1e19))) - best) / step
        squares += slope**2 * posterior.covariance[index, index]
    assert math.sqrt(squares) == pytest.approx(deviation, rel=1e-4)


def test_choosing_beats_choosing_at_random() -> None:
    posterior = published_prior(0.003)
    generator = np.random.default_rng(0)
    budgets = generator.choice([1e16, 3e16, 1e17, 3e17], size=80)
    sizes = posterior.surface.optimal_parameters(budgets) * np.exp(generator.uniform(-2, 2, 80))
    tokens = tokens_for(budgets, sizes)

    def left(plan: list[int]) -> float:
        known = posterior
        for index in plan:
            known = after_buying(known, float(sizes[index]), float(tokens[index]))
        return known.log_size_deviation(1e19)

    plan = choose(posterior, sizes, tokens, budgets, 1e19, 1e18)
    assert budgets[plan].sum() <= 1e18
    for _ in range(10):
        order = generator.permutation(80)
        random = [int(index) for index in order[np.cumsum(budgets[order]) <= 1e18]]
        assert left(plan) < left(random)


def test_a_few_runs_are_weighed_against_the_prior(surface: LossSurface) -> None:
    """Compares the most probable coefficients with those of a general optimiser."""
    from scipy.optimize import least_squares

    sweep = synthetic_sweep(surface, SweepDesign(budgets=(1e16, 1e17), num_sizes=2))
    prior = published_prior(0.003)
    deviation = np.sqrt(np.diag(prior.covariance))

    def residuals(mean: np.ndarray) -> np.ndarray:
        believed = Posterior(mean=mean, covariance=prior.covariance, noise=prior.noise).surface
        off = np.log(sweep.loss / believed.loss(sweep.parameters, sweep.tokens))
        floor, log_p, alpha, log_q, beta = mean - prior.mean
        # Prior: E and the exponents as published, the ratio of the terms, and loosely their level.
        ratio, level = (log_p - log_q) / math.hypot(*deviation[[1, 3]]), (log_p + log_q) / 2 / 3.0
        expected = floor / deviation[0], alpha / deviation[2], beta / deviation[4], ratio, level
        return np.append(off / prior.noise, expected)

    tight = {"xtol": 1e-14, "ftol": 1e-14, "gtol": 1e-14}
    searched = least_squares(residuals, prior.mean, **tight)
    found = learn(sweep.parameters, sweep.tokens, sweep.loss, 0.003)
    np.testing.assert_allclose(found.mean, searched.x, rtol=1e-3)
    assert found.noise == 0.003  # Four residuals are too few to estimate noise.


def test_learning_recovers_a_surface(surface: LossSurface) -> None:
    design = SweepDesign(budgets=(1e16, 3e16, 1e17, 3e17), num_sizes=8, reach=8)
    sweep = synthetic_sweep(surface, design, noise=0.001)
    posterior = learn(sweep.parameters, sweep.tokens, sweep.loss, 0.003)
    truth = float(surface.optimal_parameters(1e19))
    error = math.log(float(posterior.surface.optimal_parameters(1e19)) / truth)
    assert abs(error) < 3 * posterior.log_size_deviation(1e19)
    assert posterior.noise == pytest.approx(0.001, rel=0.5)


@pytest.mark.parametrize("seed", range(5))
def test_runs_of_bytes_predict_a_run_of_ten_times_their_compute(seed: int) -> None:
    # Both terms are a twentieth of those of published surfaces at the same N and D.
    surface = LossSurface(0.85, 0.33 * 1e5**0.37, 0.37, 0.42 * 1e6**0.36, 0.36)
    compute = np.repeat(2e12 / 2.0 ** np.arange(5), 4)
    sizes = np.tile([0.5, 0.8, 1.25, 2.0], 5) * surface.optimal_parameters(compute)
    tokens = tokens_for(compute, sizes)
    luck = np.random.default_rng(seed).normal(0, 0.01, len(sizes))
    posterior = learn(sizes, tokens, surface.loss(sizes, tokens) * np.exp(luck), noise=0.003)
    best = float(surface.optimal_parameters(2e13))
    target = best, float(tokens_for(2e13, best))
    predicted, truth = posterior.loss(*target), float(surface.loss(*target))
    assert predicted.value == pytest.approx(truth, rel=0.02)
    assert predicted.low is not None
    assert predicted.high is not None
    assert predicted.low < truth < predicted.high
