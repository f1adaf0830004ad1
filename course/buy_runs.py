"""Buys runs from the courses' training service: learning rates first, then runs by design.

    python course/buy_runs.py http://ADDRESS --budget 2e18 --target 1e19 > bought.jsonl

A wrong learning rate can cost as much loss as a model size that is off by a factor of ten. A small
share of the budget therefore goes into the learning-rate law: a few rates at a few sizes, fitted by
parabolas with a common curvature and a vertex that moves with log N. The law corrects losses bought
at other rates. The rest is spent in rounds; all runs so far determine those of the next round.
Prints one record per run, and one of the design.
"""

import argparse
import dataclasses
import functools
import sys

import msgspec
import numpy as np
from training_service import (
    BATCH_SIZES,
    D_MODEL_RANGE,
    LEARNING_RATE_RANGE,
    NUM_HEADS_RANGE,
    NUM_LAYERS_RANGE,
    TRAIN_FLOPS,
    HttpTrainingService,
    RunRequest,
    TrainingService,
)

from paceline.core.errors import PacelineError, UsageError
from paceline.records import Record
from paceline.scaling.design import (
    FARTHEST_BELOW,
    Posterior,
    is_near,
    learn_from,
    propose_runs,
    require_target,
)
from paceline.scaling.records import describe_design, design_record, run_record
from paceline.scaling.surface import Array
from paceline.scaling.sweep import Sweep

_SCOUT_SIZES = (1e6, 8e6, 6e7)
_SCOUT_RATES = tuple(np.geomspace(1.2e-4, 9e-4, 5))
_SCOUT_SHARE = 0.08
_NUM_SIZES = 32
_NUM_ROUNDS = 5
_ASPECT_RANGE = (12, 130)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Purchase:
    """A bought run and its loss."""

    request: RunRequest
    loss: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class RateLaw:
    """The best learning rate by size: log rate = level + slope log(N / 10^7)."""

    level: float
    slope: float
    curvature: float
    """Log loss added per squared e-fold of the rate from the best one."""

    def best(self, parameters: float) -> float:
        """Returns the best learning rate within the service's range."""
        rate = np.exp(self.level + self.slope * np.log(parameters / 1e7))
        return float(np.clip(rate, *LEARNING_RATE_RANGE))

    def excess(self, request: RunRequest) -> float:
        """Returns the log loss that a request's learning rate adds over the best one."""
        middle = self.level + self.slope * np.log(request.parameters / 1e7)
        return float(self.curvature * (np.log(request.learning_rate) - middle) ** 2)


UNTUNED = RateLaw(level=float(np.log(6e-4)), slope=-0.15, curvature=0.0)
"""The law that is assumed if the rates tried show no optimum."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Campaign:
    """All purchases, the learning-rate law, and the posterior about the surface."""

    purchases: tuple[Purchase, ...]
    rates: RateLaw
    posterior: Posterior

    @property
    def flops(self) -> float:
        """FLOPs of all runs."""
        return sum(purchase.request.train_flops for purchase in self.purchases)

    def records(self) -> list[Record]:
        """Returns a record per run."""
        return [
            run_record(
                purchase.request,
                purchase.loss,
                compute_budget=purchase.request.train_flops,
                d_model=purchase.request.d_model,
                num_layers=purchase.request.num_layers,
                num_heads=purchase.request.num_heads,
                batch_size=purchase.request.batch_size,
                learning_rate=purchase.request.learning_rate,
            )
            for purchase in self.purchases
        ]


def run_campaign(service: TrainingService, budget: float, target: float) -> Campaign:
    """Buys runs from a training service until nothing affordable is left."""
    require_target(target)
    purchases = scout_learning_rates(service, budget)
    rates = fit_rate_law(purchases)
    left = budget - sum(run.request.train_flops for run in purchases)
    for number in range(_NUM_ROUNDS):
        if left < max(min(TRAIN_FLOPS), FARTHEST_BELOW * target):
            break
        known = as_sweep(purchases, rates)
        candidates = service_candidates(learn_from(known), left, target, rates)
        plan = propose_runs(known, candidates, budget=left, target=target)
        # Early rounds buy only the cheapest part of the plan, because their losses will change it.
        plan.sort(key=lambda request: request.train_flops)
        share = (number + 1) / _NUM_ROUNDS
        for request in plan[: int(np.ceil(share * len(plan)))]:
            purchases = (*purchases, Purchase(request=request, loss=service.query(request).loss))
            left -= request.train_flops
    return Campaign(
        purchases=purchases, rates=rates, posterior=learn_from(as_sweep(purchases, rates))
    )


def scout_learning_rates(service: TrainingService, budget: float) -> tuple[Purchase, ...]:
    """Buys a few learning rates at a few sizes, with a small share of the budget."""
    num_runs = len(_SCOUT_SIZES) * len(_SCOUT_RATES)
    affordable = [flops for flops in TRAIN_FLOPS if flops <= _SCOUT_SHARE * budget / num_runs]
    if not affordable:
        least = num_runs * min(TRAIN_FLOPS) / _SCOUT_SHARE
        raise UsageError(
            f"{budget:g} FLOPs do not pay for {num_runs} learning rates; a campaign needs {least:g}"
        )
    flops = max(affordable)
    requests = [
        shape_request(size, flops, float(rate)) for size in _SCOUT_SIZES for rate in _SCOUT_RATES
    ]
    return tuple(
        Purchase(request=request, loss=service.query(request).loss) for request in requests
    )


def fit_rate_law(purchases: tuple[Purchase, ...]) -> RateLaw:
    """Fits one curvature and a vertex that moves with log N to runs with different rates."""
    sizes = np.array([run.request.parameters for run in purchases], dtype=np.float64)
    rates = np.log([run.request.learning_rate for run in purchases])
    groups = np.unique(sizes, return_inverse=True)[1]
    log_size = np.log(sizes / 1e7)
    design = np.column_stack([np.eye(groups.max() + 1)[groups], rates**2, rates, rates * log_size])
    solution = np.linalg.lstsq(design, np.log([run.loss for run in purchases]), rcond=None)[0]
    curvature, by_rate, by_both = (float(value) for value in solution[-3:])
    if curvature <= 0:
        return UNTUNED
    return RateLaw(
        level=-by_rate / (2 * curvature), slope=-by_both / (2 * curvature), curvature=curvature
    )


def as_sweep(purchases: tuple[Purchase, ...], rates: RateLaw) -> Sweep:
    """Returns runs as a sweep, with losses corrected to the best learning rate."""
    return Sweep.from_arrays(
        parameters=[run.request.parameters for run in purchases],
        compute=[run.request.train_flops for run in purchases],
        loss=[run.loss * np.exp(-rates.excess(run.request)) for run in purchases],
    )


def service_candidates(
    posterior: Posterior, budget: float, target: float, rates: RateLaw
) -> list[RunRequest]:
    """Returns the service's runs that are informative for a target, one per size and FLOPs."""
    sizes = _shapes()[0]
    ladder = np.geomspace(sizes.min(), sizes.max(), _NUM_SIZES)
    requests = {}
    for flops in TRAIN_FLOPS:
        if not FARTHEST_BELOW * target <= flops <= budget:
            continue
        best = float(posterior.surface.optimal_parameters(flops))
        for size in ladder:
            request = shape_request(size, flops, rates.best(size))
            if is_near(request.parameters, best):
                requests[request.parameters, flops] = request
    return list(requests.values())


def shape_request(parameters: float, train_flops: float, learning_rate: float) -> RunRequest:
    """Returns the request with the model nearest to a size, within the service's ranges."""
    sizes, widths, depths = _shapes()
    index = int(np.abs(np.log(sizes / parameters)).argmin())
    width = int(widths[index])
    heads = next(
        count
        for count in range(min(NUM_HEADS_RANGE[1], max(2, width // 64)), 1, -1)
        if width % count == 0
    )
    return RunRequest(
        d_model=width,
        num_layers=int(depths[index]),
        num_heads=heads,
        batch_size=BATCH_SIZES[0],
        learning_rate=learning_rate,
        train_flops=train_flops,
    )


@functools.cache
def _shapes() -> tuple[Array, Array, Array]:
    widths, depths = np.meshgrid(
        np.arange(D_MODEL_RANGE[0], D_MODEL_RANGE[1] + 1, 32.0),
        np.arange(NUM_LAYERS_RANGE[0], NUM_LAYERS_RANGE[1] + 1.0),
    )
    aspect = widths / depths
    is_sane = (aspect >= _ASPECT_RANGE[0]) & (aspect <= _ASPECT_RANGE[1])
    widths, depths = widths[is_sane], depths[is_sane]
    return 12.0 * depths * widths**2, widths, depths


def main() -> int:
    """Buys runs; prints their records and, on stderr, the predicted best model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("service", metavar="URL", help="the service's address")
    parser.add_argument("--budget", type=float, required=True, help="FLOPs of all runs together")
    parser.add_argument("--target", type=float, required=True, help="FLOPs of the model to know")
    arguments = parser.parse_args()
    try:
        service = HttpTrainingService(arguments.service)
        campaign = run_campaign(service, arguments.budget, arguments.target)
    except PacelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 + isinstance(error, UsageError)
    posterior = campaign.posterior
    for record in (*campaign.records(), design_record(posterior, arguments.target)):
        print(msgspec.json.encode(record).decode())
    print(f"best {describe_design(posterior, arguments.target)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
