"""Any world size and strategy resumes from any other, bitwise where nothing is recomputed."""

import pathlib
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.optim import AdamW, Optimizer

from paceline.checkpoint.catalog import list_checkpoints, verify_checkpoint
from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.restore import Restored, load_newest_valid
from paceline.checkpoint.state import (
    capture_random_state,
    load_training_state,
    restore_random_state,
    training_state,
)
from paceline.core.strategies import StrategyName
from paceline.parallel import RankPool, ShardedOptimizer
from paceline.parallel.strategies import apply_strategy, make_optimizer
from paceline.parallel.zero.optimizer_checkpoint import parameter_names
from tests import devices
from tests.distributed.device_pool import DevicePool
from tests.unit.data.s3_server import s3_server

Pools = Callable[[int], RankPool]
Numbers = dict[str, Tensor]

STRATEGIES: tuple[StrategyName, ...] = (
    *("ddp", "zero1", "zero2", "fsdp"),
    *("torch_ddp", "torch_fsdp2"),
)


class Tagger(nn.Module):
    """Row counts that ranks do not divide, a buffer, and dropout, which draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 7)
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + F.dropout(F.gelu(layer(x)), 0.2)
        return self.head(x) * self.scale[0]


class Run:
    def __init__(self, strategy: StrategyName, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = apply_strategy(strategy, Tagger())
        self.optimizer = make_optimizer(strategy, self.model, AdamW, lr=0.01 * (seed + 1))
        self.optimizers = {"main": self.optimizer}
        self.losses: list[float] = []

    def step(self, number: int) -> None:
        seed = 100 * number + dist.get_rank()
        tokens = torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(seed))
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flatten() % 7)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def save(self, checkpointer: Checkpointer, step: int) -> None:
        state = training_state(self.model, self.optimizers)
        checkpointer.save(step, state, {"step": step}, capture_random_state(devices.own_device()))

    def load(self, place: str) -> Restored:
        restored = load_newest_valid(
            place, lambda source: load_training_state(source, self.model, self.optimizers)
        )
        assert restored is not None
        assert not restored.passed_over
        return restored

    def numbers(self) -> Numbers:
        """Returns copies of the full state on the host, without the checkpoint code under test."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=False)
        found = {
            f"model.{k}": v for k, v in get_model_state_dict(self.model, options=options).items()
        }
        names = list(parameter_names(self.optimizer.param_groups, self.model).values())
        for name, state in zip(names, _full_states(self.optimizer), strict=True):
            found |= {f"{name}.{key}": value for key, value in state.items()}
        group = self.optimizer.param_groups[0]
        found["lr"] = torch.tensor([group["lr"], *group["betas"], group["weight_decay"]])
        return {name: value.detach().to("cpu", copy=True) for name, value in found.items()}


def _full_states(optimizer: Optimizer) -> list[dict[str, Tensor]]:
    if isinstance(optimizer, ShardedOptimizer):
        full = optimizer.state_dict()
        return [full["state"][number] for number in sorted(full["state"])]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [
        {
            key: value.full_tensor() if hasattr(value, "full_tensor") else value
            for key, value in optimizer.state[parameter].items()
        }
        for parameter in parameters
    ]


def _continue(
    rank: int, _world_size: int, strategy: StrategyName, place: str, step: int
) -> tuple[Numbers, Numbers]:
    """Loads the checkpoint, if any, trains a step and saves; returns the states around the step."""
    run = Run(strategy, seed=step)
    if step:
        assert run.load(place).step == step
    before = run.numbers() if step else {}
    run.step(step)
    with Checkpointer(place, keep=2, asynchronous=step % 2 == 0) as checkpointer:
        run.save(checkpointer, step + 1)
    return before, run.numbers()


def _require_equal(actual: Numbers, expected: Numbers, what: str) -> None:
    assert actual.keys() == expected.keys(), what
    for name, value in expected.items():
        assert torch.equal(actual[name], value), f"{what}: {name}"


CHAIN: tuple[tuple[StrategyName, int], ...] = (
    *(("ddp", 2), ("zero2", 2), ("fsdp", 2), ("torch_fsdp2", 2)),
    *(("torch_ddp", 3), ("zero1", 2), ("fsdp", 3), ("zero2", 3)),
    *(("torch_fsdp2", 3), ("none", 1), ("fsdp", 1), ("zero2", 2), ("ddp", 1)),
)


@pytest.mark.slow
def test_a_run_goes_on_under_one_strategy_after_another(
    rank_pool: Pools, tmp_path: pathlib.Path
) -> None:
    place = str(tmp_path)
    last: Numbers = {}
    for step, (strategy, world_size) in enumerate(CHAIN):
        outcomes = rank_pool(world_size).run(_continue, strategy, place, step)
        for before, _ in outcomes:
            what = f"{strategy} on {world_size} ranks after {CHAIN[step - 1]}"
            _require_equal(before, last, what)
        last = outcomes[0][1]
    assert [one.step for one in list_checkpoints(place)] == [len(CHAIN) - 1, len(CHAIN)]
    assert not list(verify_checkpoint(place, len(CHAIN)))


def _save_each(rank: int, _world_size: int, place: str) -> list[Numbers]:
    saved = []
    for strategy in STRATEGIES:
        run = Run(strategy, seed=1)
        run.step(0)
        with Checkpointer(f"{place}/{strategy}", asynchronous=False) as checkpointer:
            run.save(checkpointer, 1)
        saved.append(run.numbers())
    return saved


def _load_each(rank: int, world_size: int, place: str, saved: list[Numbers]) -> None:
    for saved_by, expected in zip(STRATEGIES, saved, strict=True):
        for strategy in STRATEGIES:
            run = Run(strategy, seed=2)
            run.load(f"{place}/{saved_by}")
            _require_equal(run.numbers(), expected, f"{saved_by} to {strategy}, {world_size} ranks")


@pytest.mark.slow
def test_every_strategy_loads_from_every_other(rank_pool: Pools, tmp_path: pathlib.Path) -> None:
    saved = rank_pool(2).run(_save_each, str(tmp_path))[0]
    for world_size in (1, 2, 3):
        rank_pool(world_size).run(_load_each, str(tmp_path), saved)


def _train(
    rank: int, _world_size: int, strategy: StrategyName, place: str, first: int, last: int
) -> tuple[list[float], Numbers]:
    run = Run(strategy, seed=5)
    torch.manual_seed(rank)
    if first:
        restored = run.load(place)
        restore_random_state(restored.ranks[rank], devices.own_device())
    with Checkpointer(place) as checkpointer:
        for step in range(first, last):
            run.step(step)
            run.save(checkpointer, step + 1)
    return run.losses, run.numbers()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(
    rank_pool: Pools, tmp_path: pathlib.Path, strategy: StrategyName
) -> None:
    pool = rank_pool(2)
    whole = pool.run(_train, strategy, str(tmp_path / "whole"), 0, 6)
    first = pool.run(_train, strategy, str(tmp_path / "halves"), 0, 3)
    then = pool.run(_train, strategy, str(tmp_path / "halves"), 3, 6)
    for rank in range(2):
        assert first[rank][0] + then[rank][0] == whole[rank][0]
        _require_equal(then[rank][1], whole[rank][1], strategy)


def _fail(rank: int, _world_size: int, place: str, asynchronous: bool) -> None:
    with Checkpointer(place, asynchronous=asynchronous) as checkpointer:
        checkpointer.save(1, {"x": torch.ones(3)}, None)
        checkpointer.wait()
        state = {"x": torch.ones(3), f"of_rank_{rank}": {1, 2} if rank == 1 else "text"}
        if asynchronous:
            checkpointer.save(2, state, None)
        with pytest.raises(
            CheckpointError, match=r"step 2: rank 1: of_rank_1: a checkpoint can contain"
        ):
            checkpointer.save(2, state, None)
        assert not checkpointer.failed
        checkpointer.save(2, {"x": torch.ones(3)}, None)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failure_of_one_rank_is_an_error_on_all(
    rank_pool: Pools, tmp_path: pathlib.Path, asynchronous: bool
) -> None:
    rank_pool(2).run(_fail, str(tmp_path), asynchronous)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def _load_damaged(rank: int, _world_size: int, place: str) -> tuple[int, str]:
    run = Run("zero2", seed=3)
    restored = load_newest_valid(
        place, lambda source: load_training_state(source, run.model, run.optimizers)
    )
    assert restored is not None
    return restored.step, restored.passed_over[0].message


def test_ranks_agree_to_fall_back(rank_pool: Pools, tmp_path: pathlib.Path) -> None:
    pool = rank_pool(2)
    pool.run(_train, "zero2", str(tmp_path), 0, 2)
    # Damages a file that only one of the ranks reads.
    (file,) = (tmp_path / "step-00000002").glob("rank-00001-*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 4
    file.write_bytes(content)
    (step, message), other = pool.run(_load_damaged, str(tmp_path))
    assert (step, message) == other
    assert step == 1
    assert "rank-00001-00000.safetensors" in message
    assert "saved by rank 1" in message


def test_ranks_save_to_a_bucket(tmp_path: pathlib.Path) -> None:
    # The pool starts inside, so that its ranks inherit the server's environment variables.
    with s3_server() as bucket, DevicePool(2, timeout_s=60) as pool:
        place = f"{bucket}/run"
        whole = pool.run(_train, "fsdp", str(tmp_path), 0, 4)
        first = pool.run(_train, "fsdp", place, 0, 2)
        then = pool.run(_train, "fsdp", place, 2, 4)
        for rank in range(2):
            assert first[rank][0] + then[rank][0] == whole[rank][0]
            _require_equal(then[rank][1], whole[rank][1], "from the bucket")
        assert [one.step for one in list_checkpoints(place)] == [1, 2, 3, 4]
        assert not list(verify_checkpoint(place, 4))
