"""What sites of an outer loop refuse, all of them, and that nothing is applied then."""

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from paceline.core.errors import PacelineError
from paceline.parallel import BucketedDataParallel, RankPool, ShardedDataParallel
from paceline.parallel.outer import exchange, header
from paceline.parallel.outer.loop import OuterLoop
from tests import devices
from tests.distributed.outer_programs import groups

Pools = Callable[[int], RankPool]


def _model(rank: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 5)).to(devices.device_of(rank))


def _step(model: nn.Module, optimizer: SGD, rank: int, step: int) -> None:
    batch = torch.randn(4, 30, generator=torch.Generator().manual_seed(10 * step + rank))
    model(batch.to(devices.device_of(rank))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _values(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def _refusal(
    rank: int,
    harm: Callable[[int, nn.Module, OuterLoop], Any],
    *,
    compression: Any = "int4",
    delay_steps: int = 0,
) -> str:
    """Returns the error of an exchange after a harm, which must leave the loop as it was."""
    sites = dist.get_world_size() // 2 if dist.get_world_size() == 4 else dist.get_world_size()
    across, inside = groups(sites, dist.get_world_size() // sites)
    model = _model(rank)
    optimizer = SGD(model.parameters(), lr=0.1)
    outer = OuterLoop(
        model,
        optimizer,
        group=across,
        inner_group=inside,
        every_steps=3,
        momentum=0.5,
        compression=compression,
        delay_steps=delay_steps,
    )
    for step in range(5):
        _step(model, optimizer, rank, step)

    def go_on() -> None:
        for step in range(5, 6 + delay_steps):
            _step(model, optimizer, rank, step)

    with harm(rank, model, outer):
        before = copy.deepcopy(outer.state_dict())
        with pytest.raises(PacelineError) as raised:
            go_on()
    after = outer.state_dict()
    assert {**before, "step": after["step"]}.keys() == after.keys()
    for name in ("num_exchanges", "last_sent", "in_flight"):
        assert before[name] == after[name]
    for old, new in zip(before["fragments"], after["fragments"], strict=True):
        assert all(torch.equal(old[name], new[name]) for name in old)
    outer.close()
    return str(raised.value)


def _flips(target: str, culprit: int, victim: int | None) -> Any:
    """Damages what arrives from one site at another, or at all."""
    original = getattr(exchange, target)

    def arrives(rows: Tensor, *arguments: Any) -> Any:
        result = original(rows, *arguments)
        (received, pending) = result if target == "start_all_to_all" else (rows, result)
        pending.wait()
        sites = dist.get_world_size(arguments[-1])
        if victim is None or dist.get_rank(arguments[-1]) == victim:
            row = received.view(sites, -1)[culprit]
            row[len(row) // 3] ^= 4
        return result

    return mock.patch.object(exchange, target, arrives)


def _damaged_out(rank: int, _world_size: int) -> str:
    return _refusal(rank, lambda *_: _flips("start_all_to_all", 1, 0))


def _damaged_back(rank: int, _world_size: int) -> str:
    return _refusal(rank, lambda *_: _flips("start_all_gather", 0, 1), compression="none")


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_damaged_message_is_refused_by_all(rank_pool: Pools, num_ranks: int) -> None:
    for text in rank_pool(num_ranks).run(_damaged_out):
        assert "a message from site 1 (rank 1) arrived damaged at site 0 (rank 0)" in text
        assert "exchange 1 (fragment 0, step 6)" in text
        assert "nothing was applied; resume all sites from their last checkpoints" in text
    for text in rank_pool(num_ranks).run(_damaged_back):
        assert "a message from site 0 (rank 0) arrived damaged at site 1 (rank 1)" in text


def _zeroed(rank: int, _world_size: int) -> str:
    def harm(*_: Any) -> Any:
        original = exchange.start_all_to_all

        def arrives(rows: Tensor, group: dist.ProcessGroup) -> Any:
            received, pending = original(rows, group)
            pending.wait()
            if dist.get_rank(group) == 0:
                received[1].zero_()
            return received, pending

        return mock.patch.object(exchange, "start_all_to_all", arrives)

    return _refusal(rank, harm)


def test_a_message_of_zeros_is_damaged(rank_pool: Pools) -> None:
    for text in rank_pool(2).run(_zeroed):
        assert "a message from site 1 (rank 1) arrived damaged at site 0 (rank 0)" in text


def _damaged_header(rank: int, _world_size: int) -> str:
    def harm(*_: Any) -> Any:
        original = header.Sites.gather

        def gather(self: header.Sites, numbers: list[int]) -> list[list[int]]:
            rows = original(self, numbers)
            if rank == 1 and len(numbers) > 2:
                rows[0][5] ^= 1 << 20
            return rows

        return mock.patch.object(header.Sites, "gather", gather)

    return _refusal(rank, harm)


def test_a_damaged_header_is_refused_by_all(rank_pool: Pools) -> None:
    for text in rank_pool(2).run(_damaged_header):
        assert "a message from site 0 (rank 0) arrived damaged at site 1 (rank 1)" in text


def _not_finite(rank: int, _world_size: int, delay_steps: int) -> str:
    def harm(_: int, model: nn.Module, __: OuterLoop) -> Any:
        if rank == dist.get_world_size() - 1:
            with torch.no_grad():
                next(model.parameters())[0, 0] = torch.inf
        return mock.MagicMock()

    return _refusal(rank, harm, delay_steps=delay_steps)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_site_that_is_not_finite_is_named(rank_pool: Pools, num_ranks: int) -> None:
    # With four ranks, both ranks of both sites raise what two counterparts have found.
    for delay_steps in (0, 2):
        for text in rank_pool(num_ranks).run(_not_finite, delay_steps):
            assert f"parameters are not finite in site 1 (rank {num_ranks - 1})" in text
            assert "nothing was applied; resume all sites from a checkpoint before it" in text


def _too_large(rank: int, _world_size: int) -> str:
    def harm(_: int, model: nn.Module, __: OuterLoop) -> Any:
        first = next(model.parameters())

        def grow(parameter: Tensor) -> None:  # After the loss, which would not be finite.
            parameter.data[0, 0] = 3e38

        first.register_post_accumulate_grad_hook(grow)  # type: ignore[no-untyped-call]
        return mock.MagicMock()

    return _refusal(rank, harm, compression="none")


def test_a_sum_that_is_not_finite_is_refused(rank_pool: Pools) -> None:
    for text in rank_pool(2).run(_too_large):
        assert "outer gradients are too large for their sum or its codes" in text


def _at_another_step(rank: int, _world_size: int) -> str:
    def harm(_: int, __: nn.Module, outer: OuterLoop) -> Any:
        if rank == 1:
            state = outer.state_dict()
            outer.load_state_dict({**state, "step": state["step"] + 3})
        return mock.MagicMock()

    return _refusal(rank, harm)


def test_sites_at_other_steps_are_refused(rank_pool: Pools) -> None:
    for text in rank_pool(2).run(_at_another_step):
        assert "site 1 (rank 1) has step 9 where site 0 (rank 0) has 6" in text
        assert "resume all sites from checkpoints of one step" in text


def _with_other_values(rank: int, _world_size: int) -> str:
    def harm(_: int, __: nn.Module, outer: OuterLoop) -> Any:
        state = outer._states[0]
        if rank == 1:
            # As a flipped bit of memory would.
            state.values.view(torch.int32)[7] ^= 1
        return mock.MagicMock()

    return _refusal(rank, harm)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sites_that_would_differ_are_refused(rank_pool: Pools, num_ranks: int) -> None:
    for text in rank_pool(num_ranks).run(_with_other_values):
        if num_ranks == 2:
            assert "of site 0 (rank 0) and site 1 (rank 1) would differ" in text
        else:
            assert "of site 1 (rank 1) from 2 of 3 sites would differ" in text


def _frozen_later(rank: int, _world_size: int) -> str:
    def harm(_: int, model: nn.Module, __: OuterLoop) -> Any:
        next(model.parameters()).requires_grad_(rank != 1)
        return mock.MagicMock()

    return _refusal(rank, harm)


def test_a_change_of_what_is_trained_is_refused(rank_pool: Pools) -> None:
    for text in rank_pool(2).run(_frozen_later):
        assert "other parameters are trained than when the outer loop was made" in text
        assert "in site 1 (rank 1)" in text


def _made(rank: int, _world_size: int, kind: str) -> str:
    """Returns the error of a loop that sites make differently."""
    across, inside = groups(2, 2)
    is_other = rank == 3
    model: nn.Module = _model(rank)
    if kind == "order" and is_other:
        model = nn.Sequential(model[1], model[0])  # type: ignore[index]
    if kind == "frozen" and is_other:
        next(model.parameters()).requires_grad_(False)
    if kind == "whole":
        model = BucketedDataParallel(model)
    if kind == "partly":
        model = BucketedDataParallel(
            model, process_group=dist.new_group([rank], use_local_synchronization=True)
        )
    if kind == "masters":
        model = ShardedDataParallel(
            model.bfloat16(), process_group=inside, master_dtype=torch.float32
        )
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(PacelineError) as raised:
        OuterLoop(
            model,
            optimizer,
            group=across,
            inner_group=dist.group.WORLD if kind == "inner" else inside,
            every_steps=5 if kind == "settings" and is_other else 4,
            compression="int8" if kind == "codec" and is_other else "int4",
        )
    return str(raised.value)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("order", r"rank 1 has parameter '0.weight' of shape \(20, 30\).* rank 3 has .*\(5, 20\)"),
        ("frozen", "rank 3 has parameter '0.weight'.* frozen"),
        ("settings", "every_steps=4.* rank 3 has settings .*every_steps=5"),
        ("codec", "compression='int4'.* rank 3 has settings .*compression='int8'"),
        ("whole", r"BucketedDataParallel '' spans ranks \[0, 1, 2, 3\], of several sites"),
        ("partly", "give inner_group all ranks that train the model"),
        ("masters", "parameter '0.weight' follows a master copy of other precision"),
        ("inner", "inner_group has ranks of other sites"),
    ],
)
def test_sites_that_differ_are_refused_at_once_by_all(
    rank_pool: Pools, kind: str, words: str
) -> None:
    for text in rank_pool(4).run(_made, kind):
        assert re.search(words, text), text


def _lost(rank: int, _world_size: int) -> str:
    model = _model(rank)
    optimizer = SGD(model.parameters(), lr=0.1)
    assert dist.group.WORLD is not None
    OuterLoop(model, optimizer, group=dist.group.WORLD, every_steps=1)
    if rank == 1:
        return ""
    with pytest.raises(PacelineError) as raised:
        _step(model, optimizer, rank, 0)
    return str(raised.value)


@pytest.fixture
def short_pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=6, run_timeout_s=60) as pool:
        yield pool


@pytest.mark.host("the short timeout is gloo's")
def test_a_site_that_does_not_come_is_an_error(short_pool: RankPool) -> None:
    text, _ = short_pool.run(_lost)
    assert "exchange 0 (fragment 0, step 1) between sites of" in text
    assert "failed" in text
