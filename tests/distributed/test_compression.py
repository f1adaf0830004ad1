"""Compressed averages on ranks, against NumPy in one process."""

import pathlib
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.restore import load_newest_valid
from paceline.checkpoint.state import load_training_state, training_state
from paceline.parallel import (
    BucketedDataParallel,
    RankError,
    RankPool,
    ShardedDataParallel,
    ShardedOptimizer,
)
from paceline.parallel.ddp import DataParallel
from paceline.parallel.strategies import make_optimizer
from tests import devices
from tests.distributed.compression_oracle import Program, expected, train

Pools = Callable[[int], RankPool]


def _require_equal(rank_pool: Pools, num_ranks: int, seeds: range, *, shards: bool) -> None:
    for seed in seeds:
        program = Program.of(seed, num_ranks, shards=shards)
        oracle = expected(program)
        for rank, parameters in enumerate(rank_pool(num_ranks).run(train, program)):
            for number, (found, value) in enumerate(zip(parameters, oracle, strict=True)):
                is_equal = torch.equal(found, value) or (
                    program.diverges_in is not None and torch.equal(found.isnan(), value.isnan())
                )
                assert is_equal, (program, rank, number, (found - value).abs().max())


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_random_programs_equal_one_process_to_the_bit(
    rank_pool: Pools, num_ranks: int, shards: bool
) -> None:
    _require_equal(rank_pool, num_ranks, range(6), shards=shards)


@pytest.mark.slow
@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("part", range(5))
def test_many_random_programs_equal_one_process_to_the_bit(
    rank_pool: Pools, part: int, shards: bool
) -> None:
    seeds = range(1000 + 50 * part, 1050 + 50 * part)
    _require_equal(rank_pool, 2 + part % 2, seeds, shards=shards)


def _sizes(rank: int, _world_size: int, compression: str | None) -> tuple[int, list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Linear(512, 512, bias=False).to(devices.device_of(rank))
    ddp = BucketedDataParallel(model, compression=compression)  # type: ignore[arg-type]
    ddp(torch.full((1, 512), float(rank + 1), device=devices.device_of(rank))).sum().backward()
    gradient = model.weight.grad
    assert gradient is not None
    return sum(ddp.message_bytes()), [gradient.cpu()]


def test_messages_have_a_quarter_and_a_fifth_of_the_bytes(rank_pool: Pools) -> None:
    (plain, [gradient]), _ = rank_pool(2).run(_sizes, None)
    for compression, share in (("int8", 0.252), ("int4", 0.189)):
        (size, [found]), (_, [other]) = rank_pool(2).run(_sizes, compression)
        assert size / plain == pytest.approx(share, abs=2e-3)
        assert torch.equal(found, other)
        assert torch.allclose(found, gradient, rtol=0.02)


def _left_out(ddp: BucketedDataParallel) -> dict[str, Tensor]:
    """Returns what this rank still owes to each parameter's gradient."""
    found = {
        parameter: tensor.clone()
        for bucket in ddp._replicated_buckets
        for parameter, tensor in bucket.left_out().items()  # type: ignore[attr-defined]
    }
    return {name: found[p] for name, p in ddp.module.named_parameters() if p in found}


def _freeze(rank: int, _world_size: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    device = devices.device_of(rank)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30)).to(device)
    ddp = BucketedDataParallel(model, compression="int4")
    generator = torch.Generator().manual_seed(rank)
    batch = torch.randn(4, 30, generator=generator).to(device)
    ddp(batch).square().sum().backward()
    before = _left_out(ddp)
    model[0].weight.requires_grad_(False)
    ddp(batch)  # Makes new buckets.
    return before, _left_out(ddp)


def test_new_buckets_owe_what_the_former_ones_left_out(rank_pool: Pools) -> None:
    for before, after in rank_pool(2).run(_freeze):
        assert after.keys() == before.keys() - {"0.weight"}
        for name, value in after.items():
            assert torch.equal(value, before[name])
        assert any(value.abs().max() > 0 for value in after.values())


def _with_both(rank: int, _world_size: int) -> None:
    model = nn.Linear(2, 2).to(devices.device_of(rank))
    BucketedDataParallel(model, compression="int4", reduction_dtype=torch.bfloat16)


def test_codes_have_no_reduction_dtype(rank_pool: Pools) -> None:
    with pytest.raises(RankError, match="reduction_dtype has no effect; leave one of them out"):
        rank_pool(2).run(_with_both)


def _total(container: DataParallel) -> dict[str, Tensor]:
    """Returns what all ranks together have left out of each parameter's gradient."""
    totals = {}
    for name, parameter in container.module.named_parameters():
        total = torch.zeros(parameter.numel(), device=parameter.device)
        for residual in container.residuals():
            if residual.name == name:
                begin = residual.start
                total[begin : begin + residual.numbers.numel()] += residual.numbers
        dist.all_reduce(total)
        totals[name] = total.cpu()
    return totals


def _trained(rank: int, shards: bool, *, steps: int) -> tuple[DataParallel, Optimizer]:
    device = devices.device_of(rank)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 31), nn.Tanh(), nn.Linear(31, 9)).to(device)
    container = (ShardedDataParallel if shards else BucketedDataParallel)(
        model, 0.002, compression="int4"
    )
    optimizer = make_optimizer("zero2" if shards else "ddp", container, SGD, lr=0.0625)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        container(torch.randn(4, 20, generator=generator).to(device)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return container, optimizer


def _save(rank: int, _world_size: int, place: str, shards: bool) -> dict[str, Tensor]:
    container, optimizer = _trained(rank, shards, steps=3)
    with Checkpointer(place, asynchronous=False) as checkpointer:
        checkpointer.save(3, training_state(container, {"main": optimizer}), {}, {})
    return _total(container)


def _load(rank: int, _world_size: int, place: str, shards: bool) -> dict[str, Tensor]:
    container, optimizer = _trained(rank, shards, steps=1)
    load_newest_valid(
        place, lambda source: load_training_state(source, container, {"main": optimizer})
    )
    return _total(container)


@pytest.mark.parametrize("shards", [False, True])
def test_other_numbers_of_ranks_owe_the_same(
    rank_pool: Pools, tmp_path: pathlib.Path, shards: bool
) -> None:
    place = str(tmp_path)
    owed, _, _ = rank_pool(3).run(_save, place, shards)
    assert all(value.abs().max() > 0 for value in owed.values())
    for num_ranks in (2, 3):
        for found in rank_pool(num_ranks).run(_load, place, shards):
            for name, value in found.items():
                torch.testing.assert_close(value, owed[name], rtol=0, atol=1e-6)


def test_a_container_without_compression_owes_nothing(
    rank_pool: Pools, tmp_path: pathlib.Path
) -> None:
    rank_pool(2).run(_save, str(tmp_path), True)
    rank_pool(2).run(_load_uncompressed, str(tmp_path))


def _load_uncompressed(rank: int, _world_size: int, place: str) -> None:
    model = nn.Sequential(nn.Linear(20, 31), nn.Tanh(), nn.Linear(31, 9))
    container = BucketedDataParallel(model.to(devices.device_of(rank)))
    optimizer = SGD(container.parameters(), lr=0.0625)
    load_newest_valid(
        place, lambda source: load_training_state(source, container, {"main": optimizer})
    )
    assert container.residuals() == []


def _bf16_parameters(rank: int, _world_size: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(40, 30).to(devices.device_of(rank), torch.bfloat16)
    container = ShardedDataParallel(model, master_dtype=torch.float32, compression="int8")
    optimizer = ShardedOptimizer(container.parameters(), SGD, lr=0.5)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        batch = torch.randn(4, 40, generator=generator).to(model.weight)
        container(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().cpu() for parameter in container.parameters()]


def test_bf16_parameters_follow_their_masters_alike(rank_pool: Pools) -> None:
    (first, *_), (second, *_) = rank_pool(2).run(_bf16_parameters)
    assert first.dtype == torch.bfloat16
    assert torch.equal(first, second)
    torch.manual_seed(0)
    assert not torch.equal(first, nn.Linear(40, 30).weight.to(torch.bfloat16))
