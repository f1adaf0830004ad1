import itertools
import types
from collections.abc import Callable

import pytest
import torch

from paceline.accounting.collectives import fit_collective
from paceline.parallel import BucketedDataParallel, RankPool, bucket_size
from paceline.parallel.bucket_size import (
    CANDIDATES_MB,
    BucketSizeChoice,
    GroupCost,
    choose_bucket_size,
)
from paceline.parallel.buckets import Bucket, RankWeight, TensorSpec, plan_buckets, tensor_spec
from tests.distributed.toys import (
    MODELS,
    data,
    loss_of,
    make_optimizer,
    oracle_backward,
    require_equal,
)

Pools = Callable[[int], RankPool]


def _train_with_auto(rank: int, world_size: int, model: str, unfreeze: bool) -> tuple[float, int]:
    torch.manual_seed(rank)
    ours = BucketedDataParallel(MODELS[model](), "auto")
    torch.manual_seed(0)
    oracle = MODELS[model]()
    optimizers = make_optimizer(ours), make_optimizer(oracle)
    chosen_at = -1
    for step in range(10):
        if unfreeze and step == 2:
            for module in (ours.module, oracle):
                module.second.weight.requires_grad_()
        if step % 3 == 1:  # The choice may fall between accumulated passes.
            with ours.no_sync():
                loss_of(ours(data(100 + step, rank), rank)).backward()
            oracle_backward(oracle, 100 + step, world_size)
        loss_of(ours(data(step, rank), rank)).backward()
        oracle_backward(oracle, step, world_size)
        require_equal(ours, oracle)
        if chosen_at < 0 and ours.bucket_size_choice is not None:
            chosen_at = step
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    assert ours.bucket_size_choice is not None
    return ours.bucket_size_choice.bucket_size_mb, chosen_at


@pytest.mark.sampled(1)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("model", ["layered", "unused_on_one_rank"])
def test_ranks_agree_on_a_size_and_training_stays_right(
    rank_pool: Pools, model: str, world_size: int
) -> None:
    results = rank_pool(world_size).run(_train_with_auto, model, False)
    assert len(set(results)) == 1
    size, chosen_at = results[0]
    assert size in CANDIDATES_MB
    assert chosen_at == 3  # One warm-up step, then three observed steps.


def test_watching_starts_anew_when_other_parameters_are_trained(rank_pool: Pools) -> None:
    results = rank_pool(2).run(_train_with_auto, "frozen", True)
    assert len(set(results)) == 1
    assert results[0][1] == 5


def _measure_with_a_slow_rank(rank: int, _world_size: int) -> BucketSizeChoice:
    settings = BucketedDataParallel(MODELS["layered"]())._settings
    before = bucket_size.time
    if rank == 1:  # Each reading of the clock is 0.05 s after the previous one.
        ticks = itertools.count(0, 0.05)
        bucket_size.time = types.SimpleNamespace(perf_counter=lambda: next(ticks))
    try:
        tuner = bucket_size.BucketSizeTuner(settings)
    finally:
        bucket_size.time = before
    for _ in range(4):
        tuner.observe([0.3 * (rank + 1)])
    return tuner.choose([TensorSpec(2**20, torch.float32, torch.device("cpu"))])


def test_the_slowest_rank_counts(rank_pool: Pools) -> None:
    choice, second = rank_pool(2).run(_measure_with_a_slow_rank)
    assert choice == second
    assert choice.start_s == pytest.approx(0.05)
    assert choice.latency_s > 0.05  # Two readings of that clock; a real call takes a millisecond.
    assert choice.backward_s == pytest.approx(0.6)


def _alone(_rank: int, _world_size: int) -> None:
    ours = BucketedDataParallel(MODELS["layered"](), "auto")
    for step in range(6):
        loss_of(ours(data(step, 0), 0)).backward()
    assert ours.bucket_size_choice is None


def test_a_rank_alone_has_nothing_to_choose(rank_pool: Pools) -> None:
    rank_pool(1).run(_alone)


def test_starting_a_call_costs_so_that_dear_calls_make_large_buckets() -> None:
    tensors = [TensorSpec(2**18, torch.float32, torch.device("cpu")) for _ in range(64)]
    arrivals_s = [0.5 * (64 - number) / 64 for number in range(64)]
    fit = fit_collective({2**12: [1e-4] * 5, 2**20: [1 / 64] * 5, 2**26: [1.0] * 5})
    cheap, dear = (
        choose_bucket_size(tensors, arrivals_s, GroupCost(fit=fit, start_s=start_s))
        for start_s in (0.0, 0.05)
    )
    assert dear.bucket_size_mb > cheap.bucket_size_mb
    for choice in (cheap, dear):
        for candidate in choice.candidates.values():
            expected = candidate.exposed_s + candidate.num_buckets * choice.start_s
            assert candidate.cost_s == pytest.approx(expected)


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_the_flags_of_used_parameters_are_part_of_a_message(dtype: torch.dtype | None) -> None:
    parameters = [torch.nn.Parameter(torch.ones(16)) for _ in range(5)]
    specs = [tensor_spec(parameter) for parameter in parameters]
    (plan,) = plan_buckets(specs, None)
    bucket = Bucket(plan, parameters, ["x"] * 5, dtype)
    message = bucket.pack(set(), RankWeight(1.0))
    assert plan.message_bytes(dtype) == message.nbytes
    assert plan.message_bytes(None) == (plan.num_elements + 5) * 4
