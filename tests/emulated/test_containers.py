"""The containers on the emulated device: equal to one process on a CPU, without races or waits."""

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.core.strategies import StrategyName
from paceline.parallel import DataParallelContainer, RankPool
from paceline.parallel.strategies import (
    apply_strategy,
    clip_grad_norm,
    make_optimizer,
    record_statistics,
    without_synchronization,
)
from tests import devices

Streams = Literal["one", "forward and backward", "forward"]
"""What runs in another stream than the step."""
_VOCABULARY, _WIDTH, _STEPS = 31, 32, 4
_REPLICATED: tuple[StrategyName, ...] = ("naive", "flat", "overlapped", "ddp", "torch_ddp")
_SHARDED: tuple[StrategyName, ...] = ("zero1", "torch_zero", "zero2", "fsdp", "torch_fsdp2")
STRATEGIES = (*_REPLICATED, *_SHARDED)
_IN_FLIGHT: tuple[StrategyName, ...] = ("overlapped", "ddp", "zero1", "zero2", "fsdp")
"""Strategies of ours that send while the device computes."""
Outcome = tuple[float, list[str], list[tuple[str, str]]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(_WIDTH, _VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _batches(world_size: int) -> Tensor:
    """Returns tokens by step, rank, sequence and position."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(_VOCABULARY, (_STEPS, world_size, 4, 9), generator=generator)


def _loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def _alone(batches: Tensor, *, clips: bool) -> dict[str, Tensor]:
    """Returns the parameters after training on the data of all ranks in one process on a CPU."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        _loss(model, batch.flatten(0, 1)).backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def _full(model: nn.Module) -> dict[str, Tensor]:
    state = model.full_state_dict() if hasattr(model, "full_state_dict") else model.state_dict()
    return {
        name.removeprefix("module."): getattr(value, "full_tensor", lambda value=value: value)()
        for name, value in state.items()
    }


def _train(
    rank: int,
    world_size: int,
    strategy: StrategyName,
    streams: Streams,
    passes: int,
    clips: bool,
    timed: bool,
    seed: int | None,
) -> Outcome:
    """Trains; returns the difference to a CPU, hazards, and waits of the host in the last step."""
    emulated_device = devices.emulated()
    device = devices.device_of(rank)
    torch.manual_seed(0)
    model = apply_strategy(strategy, Model().to(device))
    optimizer = make_optimizer(strategy, model, torch.optim.SGD, lr=0.1)
    record_statistics(model, timed)
    own, other = torch.accelerator.current_stream(device), torch.Stream(device)
    aside: Any = contextlib.nullcontext() if streams == "one" else other
    batches = _batches(world_size)
    ready = batches[:, rank].to(device)
    if passes > 1:  # torch's DDP learns its static graph in a pass that averages gradients.
        (_loss(model, ready[0]) * 0).backward()
        optimizer.zero_grad()
    emulated_device.clear()

    def step(batch: Tensor) -> None:
        for number, part in enumerate(batch.chunk(passes), start=1):
            is_local = number < passes
            with without_synchronization(model) if is_local else contextlib.nullcontext():
                other.wait_stream(own)
                with aside:
                    loss = _loss(model, part) / passes
                    if streams == "forward and backward":
                        loss.backward()
                own.wait_stream(other)
                if streams != "forward and backward":
                    loss.backward()
        if clips:
            clip_grad_norm(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()

    waits: list[tuple[str, str]] = []
    with contextlib.nullcontext() if seed is None else emulated_device.delays(seed):
        for number, batch in enumerate(ready, start=1):
            emulated_device.C.clear_synchronizations()
            step(batch)
            if number == _STEPS:
                waits = emulated_device.synchronizations()
        if timed and isinstance(model, DataParallelContainer):
            stats = model.synchronization_stats()
            assert stats is not None
            assert all(each.finish_s >= each.launch_s >= 0 for each in stats.buckets)
        torch.accelerator.synchronize()
    found = {name: value.detach().cpu() for name, value in _full(model).items()}
    expected = _alone(batches, clips=clips)
    difference = max(float((found[name] - value).abs().max()) for name, value in expected.items())
    return difference, emulated_device.hazards(), waits


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(2, backend=devices.backend(), timeout_s=120) as pool:
        yield pool


def _require(outcomes: list[Outcome], *, most_waits: int = 0) -> None:
    for difference, hazards, waits in outcomes:
        assert hazards == []
        assert len(waits) <= most_waits, waits
        assert difference < 1e-5


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("clips", [False, True])
def test_training_equals_a_cpu_without_races_and_waits(
    ranks: RankPool, strategy: StrategyName, passes: int, clips: bool
) -> None:
    _require(ranks.run(_train, strategy, "one", passes, clips, False, None))


@pytest.mark.parametrize("strategy", [*_IN_FLIGHT, "torch_ddp", "torch_fsdp2"])
@pytest.mark.parametrize("streams", ["forward and backward", "forward"])
def test_the_program_may_use_other_streams(
    ranks: RankPool, strategy: StrategyName, streams: Streams
) -> None:
    _require(ranks.run(_train, strategy, streams, 1, False, False, None))


@pytest.mark.parametrize("strategy", _IN_FLIGHT)
def test_statistics_do_not_disturb(ranks: RankPool, strategy: StrategyName) -> None:
    _require(ranks.run(_train, strategy, "one", 1, False, True, None))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("strategy", _IN_FLIGHT)
def test_streams_may_overtake_each_other(
    ranks: RankPool, strategy: StrategyName, seed: int
) -> None:
    _require(ranks.run(_train, strategy, "one", 2, True, False, seed))
