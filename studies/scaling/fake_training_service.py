"""A fake of the courses' training service with a known truth, and a study of designs with it.

It sells noisy losses of a surface, increased by a learning rate off its optimum, up to a total of
FLOPs. The noise is a function of the request, so that a repeated request returns the same loss, as
in the real service. `serve` runs it on loopback, where tests query it over HTTP. `design_study`
buys from many fakes, by design and on an even grid of the same cost.
"""

import contextlib
import dataclasses
import hashlib
import http.server
import json
import math
import sys
import threading
import urllib.parse
from collections.abc import Iterator

import numpy as np

from studies.harness.study import ROOT

# The fake sells what the courses' script buys.
sys.path.append(str(ROOT / "course"))

from buy_runs import (
    Campaign,
    Purchase,
    as_sweep,
    fit_rate_law,
    run_campaign,
    scout_learning_rates,
    shape_request,
)
from training_service import TRAIN_FLOPS, Reply, RunRequest, ServiceError, TrainingService

from paceline.core.errors import UsageError
from paceline.scaling.design import (
    EXPECTED_NOISE,
    FARTHEST_BELOW,
    REACH,
    learn_from,
    published_prior,
)
from paceline.scaling.surface import LossSurface


@dataclasses.dataclass(frozen=True, kw_only=True)
class HiddenTruth:
    """The loss surface and the learning-rate law, which customers want to learn."""

    surface: LossSurface
    noise: float = 0.003
    best_rate_at_million: float = 8e-4
    """Best learning rate for a million parameters."""
    rate_exponent: float = -0.15
    """Power of the number of parameters by which the best learning rate scales."""
    rate_penalty: float = 0.02
    """Relative loss added per squared e-fold of the learning rate from the best one."""

    def best_learning_rate(self, parameters: float) -> float:
        """Returns the learning rate with the least loss."""
        return float(self.best_rate_at_million * (parameters / 1e6) ** self.rate_exponent)

    def loss(self, request: RunRequest) -> float:
        """Returns the loss of a run; equal requests have equal losses."""
        clean = float(self.surface.loss(request.parameters, request.tokens))
        off = math.log(request.learning_rate / self.best_learning_rate(request.parameters))
        text = repr((dataclasses.astuple(request), dataclasses.astuple(self.surface)))
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])
        luck = np.random.default_rng(seed).standard_normal()
        return clean * (1 + self.rate_penalty * off**2) * math.exp(self.noise * luck)


def random_truth(seed: int, noise: float = 0.003) -> HiddenTruth:
    """Draws a surface similar to published ones, and a learning-rate law."""
    generator = np.random.default_rng(seed)
    alpha, beta = generator.uniform(0.28, 0.40, size=2)
    # Draw the two reducible terms at 10^8 parameters and 2·10^9 tokens, instead of A and B.
    by_parameters, by_tokens = generator.uniform(0.5, 1.1, size=2)
    return HiddenTruth(
        surface=LossSurface(
            irreducible=float(generator.uniform(1.5, 2.5)),
            parameter_scale=float(by_parameters * 1e8**alpha),
            parameter_exponent=float(alpha),
            token_scale=float(by_tokens * 2e9**beta),
            token_exponent=float(beta),
        ),
        noise=noise,
        best_rate_at_million=float(generator.uniform(6e-4, 1e-3)),
        rate_exponent=float(generator.uniform(-0.25, -0.1)),
    )


class FakeTrainingService:
    """An in-process training service with a total budget like that of the real one."""

    def __init__(self, truth: HiddenTruth, total_flops: float = 2e18) -> None:
        self.truth = truth
        self.total_flops = total_flops
        self.flops_used = 0.0
        self._sold: dict[RunRequest, float] = {}
        self._lock = threading.Lock()

    def query(self, request: RunRequest) -> Reply:
        """Sells a run, or repeats a sold one for free."""
        with self._lock:
            if request not in self._sold:
                if self.flops_used + request.train_flops > self.total_flops * (1 + 1e-9):
                    raise ServiceError(
                        f"{request.train_flops:g} FLOPs more than {self.flops_used:g} exceed the "
                        f"total of {self.total_flops:g}"
                    )
                self.flops_used += request.train_flops
                self._sold[request] = self.truth.loss(request)
            return Reply(loss=self._sold[request], total_flops_used=self.flops_used)


def uniform_campaign(service: TrainingService, budget: float, target: float) -> Campaign:
    """Buys an even grid of sizes at every budget for the same cost, the baseline of the design."""
    purchases = scout_learning_rates(service, budget)
    rates = fit_rate_law(purchases)
    left = budget - sum(run.request.train_flops for run in purchases)
    levels = [flops for flops in TRAIN_FLOPS if FARTHEST_BELOW * target <= flops <= budget / 8]
    num_sizes = {flops: int(left // sum(levels)) for flops in levels}
    left -= sum(flops * count for flops, count in num_sizes.items())
    for flops in reversed(levels):
        more = int(left // flops)
        num_sizes[flops] += more
        left -= more * flops
    surface = published_prior(EXPECTED_NOISE).surface
    for flops, count in num_sizes.items():
        for size in float(surface.optimal_parameters(flops)) * np.geomspace(
            1 / REACH, REACH, count
        ):
            request = shape_request(size, flops, rates.best(size))
            purchases = (*purchases, Purchase(request=request, loss=service.query(request).loss))
    return Campaign(
        purchases=purchases, rates=rates, posterior=learn_from(as_sweep(purchases, rates))
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DesignError:
    """Errors of campaigns in the best N of their target, over random surfaces."""

    within_tenth: float
    """Share of the campaigns with an error below 10%."""
    root_mean_square: float
    """Root mean square of the log ratio of the predicted to the true N."""
    largest: float


def design_study(
    *, num_surfaces: int, noise: float, total_flops: float = 2e18, target: float = 1e19
) -> dict[str, DesignError]:
    """Returns the errors of designs and of even grids of the same cost, on random surfaces."""
    errors: dict[str, list[float]] = {"design": [], "uniform": []}
    for seed in range(num_surfaces):
        truth = random_truth(seed, noise)
        best = float(truth.surface.optimal_parameters(target))
        campaigns = {
            "design": run_campaign(FakeTrainingService(truth, total_flops), total_flops, target),
            "uniform": uniform_campaign(
                FakeTrainingService(truth, total_flops), total_flops, target
            ),
        }
        for name, campaign in campaigns.items():
            found = float(campaign.posterior.surface.optimal_parameters(target))
            errors[name].append(float(np.log(found / best)))
    return {name: _design_error(np.abs(values)) for name, values in errors.items()}


def _design_error(sizes: "np.ndarray") -> DesignError:
    return DesignError(
        within_tenth=float((sizes < np.log(1.1)).mean()),
        root_mean_square=float(np.sqrt((sizes**2).mean())),
        largest=float(sizes.max()),
    )


@contextlib.contextmanager
def serve(service: FakeTrainingService) -> Iterator[str]:
    """Serves GET /loss on a free loopback port inside the context; yields the address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urllib.parse.urlsplit(self.path)
            if parts.path != "/loss":
                self._answer(404, {"detail": "only /loss is served"})
                return
            try:
                reply = service.query(_request(dict(urllib.parse.parse_qsl(parts.query))))
            except UsageError as error:
                self._answer(422, {"detail": str(error)})
            except ServiceError as error:
                self._answer(403, {"detail": str(error)})
            else:
                self._answer(200, dataclasses.asdict(reply))

        def _answer(self, status: int, content: dict[str, object]) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Discards log messages."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _request(fields: dict[str, str]) -> RunRequest:
    try:
        return RunRequest(
            d_model=int(fields["d_model"]),
            num_layers=int(fields["num_layers"]),
            num_heads=int(fields["num_heads"]),
            batch_size=int(fields["batch_size"]),
            learning_rate=float(fields["learning_rate"]),
            train_flops=float(fields["train_flops"]),
        )
    except KeyError as error:
        raise UsageError(f"{error.args[0]} is missing") from error
    except ValueError as error:
        raise UsageError(f"not a number: {error}") from error
