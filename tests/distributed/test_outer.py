"""The outer loop on ranks of several sites, against NumPy in one process."""

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from paceline.parallel import RankPool, ShardedOptimizer
from paceline.parallel.compression.codec import BLOCK
from paceline.parallel.dtensor import whole_tensor
from paceline.parallel.outer.exchange import Exchange, FragmentState
from paceline.parallel.outer.header import Header
from paceline.parallel.outer.loop import OuterLoop
from paceline.parallel.outer.optimizer import OuterUpdate
from paceline.parallel.outer.rows import packing_of
from tests import devices
from tests.distributed.outer_oracle import expected
from tests.distributed.outer_programs import STRATEGIES, Program, groups, train, wrap
from tests.unit.parallel.simulation.live_storages import LiveStorages

Pools = Callable[[int], RankPool]
_SITES = ((2, 1), (2, 2), (3, 1), (4, 1))
"""Numbers of sites, and of ranks in each."""


def _require_equal(rank_pool: Pools, programs: Sequence[Program]) -> None:
    num_ranks = programs[0].num_sites * programs[0].site_ranks
    by_rank = rank_pool(num_ranks).run(train, list(programs))
    for index, program in enumerate(programs):
        oracle = expected(program)
        for rank, steps in enumerate(oracle):
            for step, parameters in enumerate(steps):
                for number, value in enumerate(parameters):
                    found = by_rank[rank][index][step][number]
                    where = (program, f"rank {rank}, step {step + 1}, parameter {number}")
                    assert torch.equal(found, value), (where, found, value)


@pytest.mark.parametrize(("num_sites", "site_ranks"), _SITES)
def test_random_programs_equal_one_process_to_the_bit(
    rank_pool: Pools, num_sites: int, site_ranks: int
) -> None:
    _require_equal(rank_pool, [Program.of(seed, num_sites, site_ranks) for seed in range(7)])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(25))
def test_many_random_programs_equal_one_process_to_the_bit(rank_pool: Pools, part: int) -> None:
    sites = random.Random(part).choice([*_SITES, (2, 2)])
    seeds = range(1000 + 20 * part, 1020 + 20 * part)
    _require_equal(rank_pool, [Program.of(seed, *sites) for seed in seeds])


@pytest.mark.parametrize(("strategy", "delay_steps"), [("ddp", 2), ("fsdp", 0)])
def test_a_run_resumes_to_the_bit_at_every_phase_of_a_round(
    rank_pool: Pools, strategy: str, delay_steps: int
) -> None:
    program = dataclasses.replace(
        Program.of(0, 2, 2),
        strategy=strategy,
        divides=True,
        shapes=((40, 30), (7,), (513,)),
        frozen=(),
        dtype="float32",
        every_steps=6,
        fragments=2,
        delay_steps=delay_steps,
        momentum=0.5,
        compression="int4",
        steps=14,
    )
    phases = [dataclasses.replace(program, resumes_at=step) for step in range(15)]
    _require_equal(rank_pool, phases)


class _Layers(nn.Module):
    """Two layers, one of them in a list, as containers that shard by layer find them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 20)
        self.others = nn.ModuleList([nn.Linear(20, 20), nn.Linear(20, 20)])
        self.last = nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for layer in self.others:
            x = torch.tanh(layer(x))
        return self.last(x)


def _batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def _synchronous(rank: int, _world_size: int, strategy: str) -> list[Tensor]:
    across, inside = groups(2, 2)
    torch.manual_seed(0)
    model = wrap(_Layers().to(devices.device_of(rank)), strategy, inside)
    optimizer: torch.optim.Optimizer
    if strategy in ("zero1", "zero2"):
        optimizer = ShardedOptimizer(model.parameters(), SGD, process_group=inside, lr=0.1)
    else:
        optimizer = SGD(model.parameters(), lr=0.1)
    with OuterLoop(
        model, optimizer, group=across, inner_group=inside, every_steps=1, compression="none"
    ):
        for step in range(6):
            model(_batch(rank, step).to(devices.device_of(rank))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():  # Evaluation between steps sees the newest parameters.
                model(_batch(rank, step).to(devices.device_of(rank)))
    return [whole_tensor(parameter.detach()).cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_the_mean_after_each_step_is_synchronous_training(rank_pool: Pools, strategy: str) -> None:
    torch.manual_seed(0)
    alone = _Layers()
    optimizer = SGD(alone.parameters(), lr=0.1)
    for step in range(6):
        torch.stack(
            [alone(_batch(rank, step)).square().mean() for rank in range(4)]
        ).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for parameters in rank_pool(4).run(_synchronous, strategy):
        for found, value in zip(parameters, alone.parameters(), strict=True):
            torch.testing.assert_close(found, value.detach(), rtol=0, atol=1e-6)


def _reported(rank: int, _world_size: int, divides: bool) -> tuple[float, int, int, float]:
    """Returns bytes per parameter: kept, and by the settings; bytes sent; and drift of the mean."""
    across, inside = groups(2, 2)
    torch.manual_seed(0)
    model = wrap(nn.Linear(512, 512, bias=False).to(devices.device_of(rank)), "ddp", inside)
    optimizer = SGD(model.parameters(), lr=1.0)
    outer = OuterLoop(
        model,
        optimizer,
        group=across,
        inner_group=inside if divides else None,
        every_steps=1,
        momentum=0.5,
    )
    with torch.no_grad():
        before = model.module.weight.clone()
        model.module.weight.grad = torch.ones_like(before) * (1 + 2 * (rank // 2))
    optimizer.step()
    report = outer.last_exchange
    assert report is not None
    assert report.step == 1
    assert report.in_flight_s > 0
    assert report.exposed_s > 0
    assert report.own_drift == pytest.approx(
        report.mean_drift * (0.5 if rank < 2 else 1.5), rel=0.1
    )
    states = outer.state_dict()["fragments"]
    kept = sum(tensor.nbytes for state in states for tensor in state.values())
    num_exchanged = model.module.weight.numel() / (2 if divides else 1)
    outer.close()
    return (
        kept / num_exchanged,
        report.sent_bytes,
        int(num_exchanged),
        outer.settings.state_bytes(2),
    )


@pytest.mark.parametrize("divides", [True, False])
def test_each_number_goes_over_the_slow_link_once(rank_pool: Pools, divides: bool) -> None:
    for kept, sent, num_exchanged, said in rank_pool(4).run(_reported, divides):
        assert kept == said == 14
        # Half of the numbers go out and the other half's mean comes back, with a scale per 256.
        assert sent == pytest.approx(num_exchanged * (4 + 16 / 256) / 8, rel=0.01)


def _peak_in_flight(_rank: int, world_size: int, compression: Any, momentum: float) -> float:
    """Returns the most bytes per number that an exchange has allocated at a time."""
    numel = 64 * BLOCK * world_size
    codes = compression in ("int8", "int4")
    state = FragmentState(
        values=torch.zeros(numel),
        velocity=torch.zeros(numel) if momentum else None,
        left_out=torch.zeros(numel if codes else 0),
        left_back=torch.zeros(numel // world_size if codes else 0),
    )
    header = Header(
        settings=0,
        has_changed=False,
        num_members=world_size,
        exchange=0,
        fragment=0,
        step=1,
        compression=0,
        num_elements=numel,
        is_finite=True,
    )
    update = OuterUpdate(learning_rate=0.7, momentum=momentum)
    assert dist.group.WORLD is not None
    with LiveStorages(at_least=1024) as live:
        gradient = torch.ones(numel)
        exchange = Exchange(header, gradient, state, packing=packing_of(compression), update=update)
        exchange.run(dist.group.WORLD)
    assert exchange.error is None
    return live.peak_bytes / numel


@pytest.mark.host("on an accelerator, packing takes several operators, which allocate more")
@pytest.mark.parametrize(
    ("compression", "momentum", "most"), [("none", 0.0, 12), ("int4", 0.0, 18), ("int4", 0.9, 26)]
)
def test_an_exchange_allocates_no_more_than_it_says(
    rank_pool: Pools, compression: str, momentum: float, most: int
) -> None:
    for peak in rank_pool(2).run(_peak_in_flight, compression, momentum):
        assert most - 2 < peak <= most + 0.1


def _unfinished(rank: int, _world_size: int) -> tuple[list[Tensor], bool]:
    across, _ = groups(2, 1)
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(devices.device_of(rank))
    optimizer = AdamW(model.parameters())
    try:
        with OuterLoop(model, optimizer, group=across, every_steps=4) as outer:
            model(torch.full((1, 4), float(rank + 1))).sum().backward()
            optimizer.step()
            raise ValueError
    except ValueError:
        pass
    before = outer.step
    optimizer.step()
    return [p.detach() for p in model.parameters()], outer.step == before


def test_a_loop_that_an_error_leaves_sends_nothing_more(rank_pool: Pools) -> None:
    for _, is_closed in rank_pool(2).run(_unfinished):
        assert is_closed
