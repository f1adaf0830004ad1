"""Tests that campaigns stay in the service's ranges, learn its best rates and beat an even grid."""

import dataclasses
import json
import math
import urllib.error
import urllib.request

import pytest
from buy_runs import (
    Purchase,
    RateLaw,
    fit_rate_law,
    run_campaign,
    scout_learning_rates,
    shape_request,
)
from training_service import TRAIN_FLOPS, HttpTrainingService, Reply, RunRequest, ServiceError

from paceline.core.errors import UsageError
from studies.scaling.fake_training_service import (
    FakeTrainingService,
    HiddenTruth,
    design_study,
    random_truth,
    serve,
)
from tests.unit.scaling.surfaces import SURFACE

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


def test_learning_rates_are_learnt() -> None:
    truth = HiddenTruth(surface=SURFACE, noise=0.001)
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
    assert RateLaw(level=0.0, slope=0.0, curvature=0.0).best(1e7) == 1e-3  # The service's maximum.


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
    assert float(campaign.posterior.surface.optimal_parameters(1e19)) == pytest.approx(
        truth, rel=0.1
    )


def test_the_fake_answers_like_the_service() -> None:
    service = FakeTrainingService(random_truth(0), total_flops=2.5e15)
    with serve(service) as address:
        client = HttpTrainingService(address)
        first = client.query(GOOD)
        assert first.total_flops_used == 1e15
        assert client.query(GOOD) == first  # A repeated query is free.
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


def test_any_training_service_will_do() -> None:
    class Exact:
        used = 0.0

        def query(self, request: RunRequest) -> Reply:
            self.used += request.train_flops
            loss = float(SURFACE.loss(request.parameters, request.tokens))
            return Reply(loss=loss, total_flops_used=self.used)

    service = Exact()
    campaign = run_campaign(service, 3e17, 1e19)
    assert service.used == pytest.approx(campaign.flops)
    truth = float(SURFACE.optimal_parameters(1e19))
    assert float(campaign.posterior.surface.optimal_parameters(1e19)) == pytest.approx(
        truth, rel=0.05
    )
