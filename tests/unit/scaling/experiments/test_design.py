"""Proposals obey the service's ranges, spend no more than they may, and learn the most per FLOP."""

import dataclasses
import json
import math
import urllib.error
import urllib.request

import numpy as np
import pytest

from paceline.core.errors import UsageError
from paceline.scaling import LossSurface, SweepDesign, synthetic_sweep
from paceline.scaling.experiments.campaign import (
    Purchase,
    RateLaw,
    fit_rate_law,
    propose_runs,
    run_campaign,
    scout_learning_rates,
    shape_request,
)
from paceline.scaling.experiments.design import (
    Belief,
    after_buying,
    choose,
    learn,
    prior_belief,
    variance_reductions,
)
from paceline.scaling.experiments.service import (
    TRAIN_FLOPS,
    HttpTrainingService,
    Reply,
    RunRequest,
    ServiceError,
)
from paceline.scaling.surface import tokens_for
from paceline.scaling.validation.coverage import design_study
from paceline.scaling.validation.fake_service import (
    FakeTrainingService,
    HiddenTruth,
    random_truth,
    serve,
)

GOOD = RunRequest(
    d_model=512, num_layers=8, num_heads=8, batch_size=128, learning_rate=5e-4, train_flops=1e15
)


@pytest.mark.parametrize(
    "change",
    [
        {"d_model": 32},
        {"num_layers": 25},
        {"num_heads": 1},
        {"batch_size": 64},
        {"learning_rate": 2e-3},
        {"train_flops": 2e15},
    ],
    ids=str,
)
def test_requests_out_of_range_cannot_be_made(change: dict[str, float]) -> None:
    (field,) = change
    with pytest.raises(UsageError, match=f"{field} is .*the service takes"):
        dataclasses.replace(GOOD, **change)  # type: ignore[arg-type]


def test_the_service_sells_what_the_course_sells() -> None:
    assert len(TRAIN_FLOPS) == 16
    assert (min(TRAIN_FLOPS), max(TRAIN_FLOPS)) == (1e13, 1e18)
    assert GOOD.parameters == 12 * 8 * 512**2
    assert 6 * GOOD.parameters * GOOD.tokens == pytest.approx(1e15)


def test_proposals_spend_the_budget_and_no_more() -> None:
    runs = propose_runs(None, 2e18, 1e19)
    spent = sum(run.train_flops for run in runs)
    assert 1.9e18 < spent <= 2e18
    assert len({(run.parameters, run.train_flops) for run in runs}) == len(runs)
    with pytest.raises(UsageError, match="buys no run"):
        propose_runs(None, 1e12, 1e19)


def test_known_runs_are_not_bought_again(surface: LossSurface) -> None:
    first = propose_runs(None, 2e17, 1e19)
    parameters = np.array([run.parameters for run in first], dtype=np.float64)
    compute = np.array([run.train_flops for run in first])
    known = synthetic_sweep(surface)
    known = dataclasses.replace(
        known,
        parameters=parameters,
        compute=compute,
        tokens=tokens_for(compute, parameters),
        loss=surface.loss(parameters, tokens_for(compute, parameters)),
    )
    again = propose_runs(known, 2e17, 1e19)
    bought = {(run.parameters, run.train_flops) for run in first}
    assert again
    assert not bought & {(run.parameters, run.train_flops) for run in again}


def test_the_variance_falls_as_foretold() -> None:
    belief = prior_belief(0.003)
    sizes, budgets = np.array([3e7, 1e8, 3e6]), np.array([1e17, 3e17, 1e16])
    tokens = tokens_for(budgets, sizes)
    foretold = variance_reductions(belief, sizes, tokens, 1e19)
    for index in range(3):
        after = after_buying(belief, float(sizes[index]), float(tokens[index]))
        fallen = belief.log_size_deviation(1e19) ** 2 - after.log_size_deviation(1e19) ** 2
        assert fallen == pytest.approx(foretold[index], rel=1e-6)
        assert fallen > 0


def test_the_slope_of_the_optimum_is_its_derivative() -> None:
    belief = prior_belief(0.003)
    best = math.log(float(belief.surface.optimal_parameters(1e19)))
    deviation = belief.log_size_deviation(1e19)
    squares = 0.0
    for index in range(5):
        step = 1e-6
        mean = belief.mean.copy()
        mean[index] += step
        moved = Belief(mean=mean, covariance=belief.covariance, noise=belief.noise)
        slope = (math.log(float(moved.surface.optimal_parameters(1e19))) - best) / step
        squares += slope**2 * belief.covariance[index, index]
    assert math.sqrt(squares) == pytest.approx(deviation, rel=1e-4)


def test_choosing_beats_choosing_at_random() -> None:
    belief = prior_belief(0.003)
    generator = np.random.default_rng(0)
    budgets = generator.choice([1e16, 3e16, 1e17, 3e17], size=80)
    sizes = belief.surface.optimal_parameters(budgets) * np.exp(generator.uniform(-2, 2, 80))
    tokens = tokens_for(budgets, sizes)

    def left(plan: list[int]) -> float:
        known = belief
        for index in plan:
            known = after_buying(known, float(sizes[index]), float(tokens[index]))
        return known.log_size_deviation(1e19)

    plan = choose(belief, sizes, tokens, budgets, 1e19, 1e18)
    assert budgets[plan].sum() <= 1e18
    for _ in range(10):
        order = generator.permutation(80)
        random = [int(index) for index in order[np.cumsum(budgets[order]) <= 1e18]]
        assert left(plan) < left(random)


def test_learning_recovers_a_surface(surface: LossSurface) -> None:
    design = SweepDesign(budgets=(1e16, 3e16, 1e17, 3e17), num_sizes=8, reach=8)
    sweep = synthetic_sweep(surface, design, noise=0.001)
    belief = learn(sweep.parameters, sweep.tokens, sweep.loss, 0.003)
    truth = float(surface.optimal_parameters(1e19))
    error = math.log(float(belief.surface.optimal_parameters(1e19)) / truth)
    assert abs(error) < 3 * belief.log_size_deviation(1e19)
    assert belief.noise == pytest.approx(0.001, rel=0.5)


def test_learning_rates_are_learnt(surface: LossSurface) -> None:
    truth = HiddenTruth(surface=surface, noise=0.001)
    service = FakeTrainingService(truth)
    rates = fit_rate_law(scout_learning_rates(service, 2e18))
    assert service.flops_used < 0.1 * 2e18
    for size in (1e6, 1e7, 1e8):
        assert rates.best(size) == pytest.approx(truth.best_learning_rate(size), rel=0.2)
    assert rates.curvature == pytest.approx(truth.rate_penalty, rel=0.2)


def test_rates_that_do_not_matter_leave_the_default() -> None:
    # Losses that are highest in the middle have no best rate.
    purchases = tuple(
        Purchase(
            request=shape_request(size, 1e15, rate),
            loss=3 - 0.1 * (math.log(rate) - math.log(3e-4)) ** 2,
        )
        for size in (1e6, 1e7)
        for rate in (1e-4, 3e-4, 9e-4)
    )
    assert fit_rate_law(purchases).curvature == 0
    assert RateLaw(level=0.0, slope=0.0, curvature=0.0).best(1e7) == 1e-3  # The service's most.


def test_the_design_finds_the_optimum_and_beats_an_even_grid() -> None:
    errors = design_study(num_surfaces=20, noise=0.003)
    assert errors["design"].within_tenth >= 0.9
    assert errors["design"].root_mean_square < 0.9 * errors["uniform"].root_mean_square


def test_a_campaign_over_http() -> None:
    service = FakeTrainingService(random_truth(3))
    with serve(service) as address:
        assert address.startswith("http://127.0.0.1:")
        campaign = run_campaign(HttpTrainingService(f"{address}?api_key=none"), 2e18, 1e19)
    assert campaign.flops == pytest.approx(service.flops_used)
    assert campaign.flops <= 2e18
    truth = float(service.truth.surface.optimal_parameters(1e19))
    assert float(campaign.belief.surface.optimal_parameters(1e19)) == pytest.approx(truth, rel=0.1)


def test_the_fake_answers_like_the_service() -> None:
    service = FakeTrainingService(random_truth(0), total_flops=2.5e15)
    with serve(service) as address:
        client = HttpTrainingService(address)
        first = client.query(GOOD)
        assert first.total_flops_used == 1e15
        assert client.query(GOOD) == first  # Asked again, it is free and the same.
        other = dataclasses.replace(GOOD, num_layers=4)
        assert client.query(other).total_flops_used == 2e15
        with pytest.raises(ServiceError, match=r"403 .*exceed the total"):
            client.query(dataclasses.replace(GOOD, num_layers=6))
        for query, status in (("loss?d_model=5", 422), ("loss?d_model=a", 422), ("other", 404)):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(f"{address}/{query}")
            assert refused.value.code == status
            assert json.load(refused.value)["detail"]
            refused.value.close()
    with pytest.raises(ServiceError, match="is it running"):
        client.query(GOOD)
    with pytest.raises(UsageError, match="an address such as"):
        HttpTrainingService("localhost:8000")


def test_any_training_service_will_do(surface: LossSurface) -> None:
    class Exact:
        used = 0.0

        def query(self, request: RunRequest) -> Reply:
            self.used += request.train_flops
            loss = float(surface.loss(request.parameters, request.tokens))
            return Reply(loss=loss, total_flops_used=self.used)

    service = Exact()
    campaign = run_campaign(service, 3e17, 1e19)
    assert service.used == pytest.approx(campaign.flops)
    truth = float(surface.optimal_parameters(1e19))
    assert float(campaign.belief.surface.optimal_parameters(1e19)) == pytest.approx(truth, rel=0.05)
