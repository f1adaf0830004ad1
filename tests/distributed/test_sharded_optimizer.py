"""Compares the sharded optimizer bitwise with the same optimizer in one process."""

import copy
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import SGD, Adafactor, Adagrad, AdamW, Muon, Optimizer

from paceline.core.errors import UsageError
from paceline.parallel import BucketedDataParallel, RankPool, ShardedDataParallel, ShardedOptimizer
from paceline.parallel.zero.optimizer_state import OptimizerStateError
from tests import devices
from tests.distributed.toys import (
    MODELS,
    WIDTH,
    Layered,
    Shapes,
    data,
    loss_of,
    make_pair,
    oracle_backward,
    require_identical,
)

Pools = Callable[[int], RankPool]

ADAMW: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1}
CASES: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adamw_loop": (AdamW, {**ADAMW, "foreach": False}),
    "adamw_foreach": (AdamW, {**ADAMW, "foreach": True}),
    "adamw_amsgrad": (AdamW, {**ADAMW, "amsgrad": True}),
    "sgd_momentum": (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "adagrad": (Adagrad, {"lr": 0.1}),
    "adafactor": (Adafactor, {"lr": 0.1}),
}


def _model(seed: int = 0, name: str = "layered") -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]()


def _require_bits(actual: nn.Module, expected: nn.Module) -> None:
    for (name, own), other in zip(actual.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(own, other), f"{name} differs by {(own - other).abs().max()}"


def _step(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model(data(step, 7), 0)).backward()
    if isinstance(model, Shapes):
        # Random gradients, because matmuls may round differently at other addresses.
        torch.manual_seed(step)
        for parameter in model.parameters():
            parameter.grad.copy_(torch.randn(parameter.shape, dtype=parameter.dtype))
    optimizer.step()


def _train(rank: int, _world_size: int, case: str, partition: str | None, model_name: str) -> None:
    optimizer_cls, options = CASES[case]
    ours, alone = _model(name=model_name), _model(name=model_name)
    sharded = ShardedOptimizer(ours.parameters(), optimizer_cls, partition=partition, **options)
    whole = optimizer_cls(alone.parameters(), **options)
    for step in range(10):
        _step(ours, sharded, step)
        _step(alone, whole, step)
        _require_bits(ours, alone)


@pytest.mark.sampled(22)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("case", "partition"),
    [
        *((case, "parameters") for case in CASES),
        *((case, "elements") for case in CASES if case != "adafactor"),
    ],
)
def test_bits_of_the_unsharded_optimizer(
    rank_pool: Pools, case: str, partition: str, world_size: int
) -> None:
    rank_pool(world_size).run(_train, case, partition, "layered")


@pytest.mark.parametrize("model", ["tied", "frozen", "unused", "shapes", "unused_on_one_rank"])
@pytest.mark.parametrize("partition", ["parameters", "elements"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_bits_with_unusual_parameters(
    rank_pool: Pools, model: str, partition: str, world_size: int
) -> None:
    rank_pool(world_size).run(_train, "adamw_loop", partition, model)


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(5))

    def forward(self, x: Tensor, _rank: int) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _train_muon(_rank: int, _world_size: int) -> None:
    torch.manual_seed(0)
    ours = Matrices()
    torch.manual_seed(0)
    alone = Matrices()
    sharded = ShardedOptimizer(ours.parameters(), Muon, lr=0.05)
    assert sharded.partition == "parameters"
    whole = Muon(alone.parameters(), lr=0.05)
    for step in range(10):
        _step(ours, sharded, step)
        _step(alone, whole, step)
        _require_bits(ours, alone)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_muon_keeps_its_matrices_whole(rank_pool: Pools, world_size: int) -> None:
    rank_pool(world_size).run(_train_muon)


def _train_fused(_rank: int, _world_size: int) -> None:
    ours, alone = _model(), _model()
    sharded = ShardedOptimizer(ours.parameters(), AdamW, lr=0.01, fused=True)
    whole = AdamW(alone.parameters(), lr=0.01, fused=True)
    for step in range(10):
        _step(ours, sharded, step)
        _step(alone, whole, step)
    for own, other in zip(ours.parameters(), alone.parameters(), strict=True):
        require_identical(own.detach(), "parameter")
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_fused_adamw_is_close(rank_pool: Pools, world_size: int) -> None:
    rank_pool(world_size).run(_train_fused)


def _under_container(rank: int, world_size: int, model: str, container: str) -> None:
    ours, oracle = make_pair(rank, model, container)
    sharded = ShardedOptimizer(ours.parameters(), AdamW, **ADAMW)
    whole = AdamW(oracle.parameters(), **ADAMW)
    for step in range(3):
        loss_of(ours(data(step, rank), rank)).backward()
        oracle_backward(oracle, step, world_size)
        sharded.step()
        sharded.zero_grad(set_to_none=step % 2 == 0)
        whole.step()
        whole.zero_grad()
        for (name, own), other in zip(ours.named_parameters(), oracle.parameters(), strict=True):
            require_identical(own.detach(), name)
            # Adam divides by the gradient's magnitude, which amplifies rounding of tiny gradients.
            torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("container", ["naive", "flat", "overlapped", "ddp"])
@pytest.mark.parametrize("model", ["layered", "tied", "frozen", "unused", "unused_on_one_rank"])
def test_works_with_every_container(rank_pool: Pools, model: str, container: str) -> None:
    rank_pool(2).run(_under_container, model, container)


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": weights}, {"params": others, "weight_decay": 0.0, "lr": 0.02}]


def _schedule(_rank: int, _world_size: int, partition: str, tensor_lr: bool) -> None:
    pairs = []
    for sharded in (True, False):
        model = _model()
        options: dict[str, Any] = {
            "lr": torch.tensor(0.1) if tensor_lr else 0.1,
            "weight_decay": 0.1,
        }
        groups = _groups(model)[:1] if tensor_lr else _groups(model)
        make = functools.partial(ShardedOptimizer, partition=partition) if sharded else None
        optimizer = make(groups, AdamW, **options) if make is not None else AdamW(groups, **options)
        if tensor_lr:
            optimizer.add_param_group(_groups(model)[1])
        pairs.append((model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)))
    for step in range(6):
        for model, optimizer, scheduler in pairs:
            _step(model, optimizer, step)
            scheduler.step()
        _require_bits(pairs[0][0], pairs[1][0])
    assert float(pairs[0][1].param_groups[0]["lr"]) == pytest.approx(0.1 * 0.7**6)


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("partition", ["parameters", "elements"])
def test_groups_and_schedulers_act_on_the_shards(
    rank_pool: Pools, partition: str, tensor_lr: bool
) -> None:
    rank_pool(3).run(_schedule, partition, tensor_lr)


def _unfreeze(_rank: int, _world_size: int, partition: str) -> None:
    pairs = []
    for sharded in (True, False):
        model = _model()
        model.second.weight.requires_grad_(False)
        optimizer = (
            ShardedOptimizer(model.parameters(), AdamW, partition=partition, **ADAMW)
            if sharded
            else AdamW(model.parameters(), **ADAMW)
        )
        pairs.append((model, optimizer))
    for step in range(6):
        for model, optimizer in pairs:
            model.second.weight.requires_grad_(step >= 3)
            _step(model, optimizer, step)
        _require_bits(pairs[0][0], pairs[1][0])


@pytest.mark.parametrize("partition", ["parameters", "elements"])
def test_a_parameter_is_unfrozen_on_the_way(rank_pool: Pools, partition: str) -> None:
    rank_pool(2).run(_unfreeze, partition)


def _closure(_rank: int, _world_size: int) -> None:
    ours, alone = _model(), _model()
    optimizers = (
        ShardedOptimizer(ours.parameters(), AdamW, lr=0.1),
        AdamW(alone.parameters(), lr=0.1),
    )
    losses = []
    for model, optimizer in zip((ours, alone), optimizers, strict=True):

        def closure(model: nn.Module = model, optimizer: Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(data(0, 7), 0))
            loss.backward()
            return loss

        losses.append(optimizer.step(closure))
    assert torch.equal(losses[0], losses[1])
    _require_bits(ours, alone)


def test_a_closure_gives_its_loss(rank_pool: Pools) -> None:
    rank_pool(2).run(_closure)


def _zero_grad(_rank: int, _world_size: int, set_to_none: bool) -> None:
    model = _model()
    optimizer = ShardedOptimizer(model.parameters(), AdamW, lr=0.1)
    loss_of(model(data(0, 7), 0)).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=set_to_none)
    for parameter in model.parameters():
        assert parameter.grad is None if set_to_none else not parameter.grad.any()


@pytest.mark.parametrize("set_to_none", [False, True])
def test_all_gradients_are_cleared(rank_pool: Pools, set_to_none: bool) -> None:
    rank_pool(2).run(_zero_grad, set_to_none)


def _few_elements(_rank: int, _world_size: int, partition: str) -> None:
    ours, alone = (nn.Parameter(torch.tensor([1.0])) for _ in range(2))
    optimizers = (
        ShardedOptimizer([ours], AdamW, partition=partition, lr=0.1),
        AdamW([alone], lr=0.1),
    )
    for _ in range(3):
        for parameter, optimizer in zip((ours, alone), optimizers, strict=True):
            parameter.grad = torch.tensor([0.5])
            optimizer.step()
    assert torch.equal(ours, alone)
    num_shards = torch.tensor(len(list(optimizers[0].shards())))
    dist.all_reduce(num_shards)
    assert num_shards == 1


@pytest.mark.parametrize("partition", ["parameters", "elements"])
def test_ranks_that_own_nothing_take_part(rank_pool: Pools, partition: str) -> None:
    rank_pool(4).run(_few_elements, partition)


class DominantEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50_000, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(40))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return x


def _state_bytes(_rank: int, world_size: int) -> tuple[float, float]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ratios = []
    for theirs in (False, True):
        torch.manual_seed(0)
        model = DominantEmbedding()
        optimizer: Any = (
            ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.1)
            if theirs
            else ShardedOptimizer(model.parameters(), AdamW, lr=0.1)
        )
        model(torch.arange(100)).sum().backward()
        optimizer.step()
        inner = [optimizer.optim] if theirs else [p.inner for p in optimizer.parts if p.inner]
        own = sum(
            state[name].nbytes
            for one in inner
            for state in one.state.values()
            for name in ("exp_avg", "exp_avg_sq")
        )
        total = torch.tensor(own)
        dist.all_reduce(total, dist.ReduceOp.MAX)
        ideal = 8 * sum(p.numel() for p in model.parameters()) / world_size
        ratios.append(float(total) / ideal)
    return ratios[0], ratios[1]


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_state_is_divided_evenly(rank_pool: Pools, world_size: int) -> None:
    ours, torchs = rank_pool(world_size).run(_state_bytes)[0]
    assert ours <= 1.01
    assert torchs > 1.5  # It does not split the embedding.


def _save(
    _rank: int, _world_size: int, case: str, partition: str, model_name: str, path: str
) -> dict[str, Any]:
    optimizer_cls, options = CASES[case]
    model = _model(name=model_name)
    optimizer = ShardedOptimizer(model.parameters(), optimizer_cls, partition=partition, **options)
    for step in range(3):
        _step(model, optimizer, step)
    optimizer.param_groups[0]["lr"] = 0.03
    state = {"model": model.state_dict(), "optimizer": optimizer.checkpoint_state(model)}
    dcp.save(state, checkpoint_id=path)
    return optimizer.full_state_dict()


def _continue(
    _rank: int,
    _world_size: int,
    full: dict[str, Any],
    case: str,
    partition: str,
    model_name: str,
    path: str,
) -> None:
    optimizer_cls, options = CASES[case]
    make_sharded = functools.partial(
        ShardedOptimizer, optimizer_cls=optimizer_cls, partition=partition
    )
    never_saved = _model(name=model_name)
    reference = optimizer_cls(never_saved.parameters(), **options)
    for step in range(3):
        _step(never_saved, reference, step)
    reference.param_groups[0]["lr"] = 0.03
    _require_same_state(full, reference.state_dict())
    # Checkpoint into shards; full state dict into shards and into plain torch.optim.
    weights = {"model": _model(5, model_name).state_dict()}
    dcp.load(weights, checkpoint_id=path)
    runs = []
    for number, make in enumerate((make_sharded, make_sharded, optimizer_cls)):
        model = _model(6 + number, model_name)
        optimizer = make(model.parameters(), **options)
        model.load_state_dict(weights["model"])
        runs.append((model, optimizer))
    (ours, from_checkpoint), (_, from_full), (alone, plain) = runs
    from_checkpoint.load_checkpoint(ours, dcp.FileSystemReader(path))
    from_full.load_state_dict(full)
    # All ranks received the same shared memory, and torch's optimizer keeps the loaded tensors.
    plain.load_state_dict(copy.deepcopy(full))
    for step in range(3, 6):
        for model, optimizer in (*runs, (never_saved, reference)):
            _step(model, optimizer, step)
    for model, _ in runs:
        _require_bits(model, never_saved)
    # And back: from plain torch.optim into shards.
    back = _model(9, model_name)
    again = make_sharded(back.parameters(), **options)
    back.load_state_dict(alone.state_dict())
    again.load_state_dict(plain.state_dict())
    for model, optimizer in ((back, again), (alone, plain)):
        _step(model, optimizer, 6)
    _require_bits(back, alone)


def _require_same_state(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual["param_groups"] == expected["param_groups"]
    for number, state in expected["state"].items():
        if number not in actual["state"]:  # A parameter without elements has no shard.
            assert not state["exp_avg"].numel()
            continue
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(actual["state"][number][key]).cpu(), value.cpu())


@pytest.mark.sampled(8)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    ("case", "partition", "then", "model"),
    [
        ("adamw_loop", "elements", "elements", "layered"),
        ("adamw_loop", "elements", "parameters", "tied"),
        ("adamw_loop", "parameters", "elements", "frozen"),
        ("adamw_loop", "elements", "parameters", "shapes"),
        ("sgd_momentum", "parameters", "elements", "unused"),
        ("adafactor", "parameters", "parameters", "layered"),
    ],
)
def test_saved_by_four_ranks_continued_by_fewer(
    rank_pool: Pools,
    tmp_path: pathlib.Path,
    case: str,
    partition: str,
    then: str,
    model: str,
    world_size: int,
) -> None:
    full, *others = rank_pool(4).run(_save, case, partition, model, str(tmp_path))
    assert not any(others)
    rank_pool(world_size).run(_continue, full, case, then, model, str(tmp_path))


def _refuse_states(_rank: int, _world_size: int, path: str) -> None:
    model = _model()
    optimizer = ShardedOptimizer(model.parameters(), AdamW, lr=0.1)
    reader = dcp.FileSystemReader(path)
    with pytest.raises(OptimizerStateError, match="has no sharded optimizer under 'other'"):
        optimizer.load_checkpoint(model, reader, prefix="other")
    with pytest.raises(OptimizerStateError, match=r"has no parameter '0\.first\.weight'"):
        optimizer.load_checkpoint(nn.Sequential(model), reader)
    with pytest.raises(OptimizerStateError, match="parameter 0 of the optimizer is not a param"):
        optimizer.load_checkpoint(_model(), reader)
    wider = _model()
    wider.first = nn.Linear(WIDTH, 41)
    with pytest.raises(OptimizerStateError, match=r"'first.weight' was saved .*\[41, 10\]"):
        ShardedOptimizer(wider.parameters(), AdamW).load_checkpoint(wider, reader)
    with pytest.raises(OptimizerStateError, match=r"groups have \[2\] .* saved ones \[5\]"):
        ShardedOptimizer(wider.first.parameters(), AdamW, lr=0.1).load_state_dict(
            AdamW(model.parameters()).state_dict()
        )


def test_what_does_not_fit_is_refused_by_name(rank_pool: Pools, tmp_path: pathlib.Path) -> None:
    rank_pool(4).run(_save, "adamw_loop", "elements", "layered", str(tmp_path))
    rank_pool(1).run(_refuse_states, str(tmp_path))


def _refuse(_rank: int, _world_size: int) -> None:
    model = _model()
    with pytest.raises(UsageError, match=r"LBFGS .* cannot be sharded"):
        ShardedOptimizer(model.parameters(), torch.optim.LBFGS)
    with pytest.raises(UsageError, match=r'Adafactor .* partition="parameters"'):
        ShardedOptimizer(model.parameters(), Adafactor, partition="elements")
    with pytest.raises(UsageError, match="partition must be one of"):
        ShardedOptimizer(model.parameters(), AdamW, partition="rows")
    with pytest.raises(ValueError, match="Invalid learning rate"):
        ShardedOptimizer(model.parameters(), AdamW, lr=-1.0)
    optimizer = ShardedOptimizer(model.parameters(), AdamW)
    model.to(torch.bfloat16)
    loss_of(model(data(0, 0).bfloat16(), 0)).backward()
    with pytest.raises(UsageError, match="moved or converted"):
        optimizer.step()
    sparse = nn.Embedding(10, 4, sparse=True)
    sparse_optimizer = ShardedOptimizer(sparse.parameters(), AdamW)
    sparse(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match="sparse"):
        sparse_optimizer.step()


def test_what_cannot_work_is_refused_by_name(rank_pool: Pools) -> None:
    rank_pool(1).run(_refuse)


def _mixed_dtypes(_rank: int, _world_size: int, partition: str) -> None:
    def build() -> nn.Module:
        model = _model()
        model.third.to(torch.bfloat16)
        return model

    def run(model: nn.Module, optimizer: Optimizer, step: int) -> None:
        optimizer.zero_grad()
        hidden = model.second(torch.relu(model.first(data(step, 7))))
        model.third(hidden.bfloat16()).float().square().mean().backward()
        optimizer.step()

    ours, alone = build(), build()
    sharded = ShardedOptimizer(ours.parameters(), AdamW, partition=partition, **ADAMW)
    whole = AdamW(alone.parameters(), **ADAMW)
    for step in range(4):
        run(ours, sharded, step)
        run(alone, whole, step)
        _require_bits(ours, alone)


@pytest.mark.parametrize("partition", ["parameters", "elements"])
def test_mixed_dtypes(rank_pool: Pools, partition: str) -> None:
    rank_pool(3).run(_mixed_dtypes, partition)


def _scaled(_rank: int, _world_size: int) -> None:
    ours, alone = _model(), _model()
    optimizers = ShardedOptimizer(ours.parameters(), SGD, lr=0.1), SGD(alone.parameters(), lr=0.1)
    for model, optimizer in zip((ours, alone), optimizers, strict=True):
        scaler = torch.amp.GradScaler(devices.own_device().type, init_scale=8.0)
        for step, factor in enumerate((1.0, float("inf"), 1.0)):
            optimizer.zero_grad()
            scaler.scale(loss_of(model(data(step, 7), 0)) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
    _require_bits(ours, alone)


def test_a_gradient_scaler_skips_steps(rank_pool: Pools) -> None:
    rank_pool(2).run(_scaled)


def _defaults(_rank: int, _world_size: int) -> None:
    optimizer = ShardedOptimizer(Layered().parameters(), AdamW)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    assert optimizer.param_groups[0]["lr"] == AdamW([torch.zeros(1)]).defaults["lr"]


def test_the_defaults_of_the_optimizer_are_in_the_groups(rank_pool: Pools) -> None:
    rank_pool(2).run(_defaults)


class Counting(SGD):
    """Counts its steps in its parameter groups, and takes smaller and smaller steps."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.defaults["count"] = 0
        for group in self.param_groups:
            group["count"] = 0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-group["lr"] / group["count"])


def _count(_rank: int, _world_size: int) -> None:
    ours, alone = _model(), _model()
    optimizers = (
        ShardedOptimizer(ours.parameters(), Counting, lr=0.1),
        Counting(alone.parameters(), lr=0.1),
    )
    for step in range(4):
        for model, optimizer in zip((ours, alone), optimizers, strict=True):
            _step(model, optimizer, step)
            optimizer.param_groups[0]["lr"] *= 0.9
        _require_bits(ours, alone)


def test_an_optimizer_may_count_in_its_options(rank_pool: Pools) -> None:
    rank_pool(2).run(_count)


def _copy_optimizer(_rank: int, _world_size: int) -> None:
    optimizer = ShardedOptimizer(_model().parameters(), AdamW)
    with pytest.raises(UsageError, match=r"cannot be copied or pickled.*full_state_dict"):
        copy.deepcopy(optimizer)


def test_a_copy_is_refused_by_name(rank_pool: Pools) -> None:
    rank_pool(1).run(_copy_optimizer)


def _over_dtensors(_rank: int, world_size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = _model()
    fully_shard(model, mesh=init_device_mesh(devices.own_device().type, (world_size,)))
    with pytest.raises(UsageError, match=r"is a DTensor.*use a plain optimizer"):
        ShardedOptimizer(model.parameters(), AdamW)


def test_parameters_that_are_sharded_already_are_refused(rank_pool: Pools) -> None:
    rank_pool(2).run(_over_dtensors)


def _save_counts(_rank: int, _world_size: int, path: str) -> dict[str, Any]:
    model = _model()
    optimizer = ShardedOptimizer(model.parameters(), Counting, lr=0.1)
    alone = _model()
    plain = Counting(alone.parameters(), lr=0.1)
    for step in range(3):
        _step(model, optimizer, step)
        _step(alone, plain, step)
    assert optimizer.param_groups[0]["count"] == plain.param_groups[0]["count"] == 3
    assert optimizer.state_dict()["param_groups"] == plain.state_dict()["param_groups"]
    state = {"model": model.state_dict(), "optimizer": optimizer.checkpoint_state(model)}
    dcp.save(state, checkpoint_id=path)
    return optimizer.full_state_dict()


def _continue_counts(_rank: int, _world_size: int, full: dict[str, Any], path: str) -> None:
    reference = _model()
    plain = Counting(reference.parameters(), lr=0.1)
    runs = []
    for _ in range(2):
        model = _model(5)
        runs.append((model, ShardedOptimizer(model.parameters(), Counting, lr=0.1)))
    for step in range(3):
        _step(reference, plain, step)
    weights = {"model": runs[0][0].state_dict()}
    dcp.load(weights, checkpoint_id=path)
    for model, _ in runs:
        model.load_state_dict(weights["model"])
    runs[0][1].load_checkpoint(runs[0][0], dcp.FileSystemReader(path))
    runs[1][1].load_state_dict(full)
    for model, optimizer in (*runs, (reference, plain)):
        _step(model, optimizer, 3)
    for model, optimizer in runs:
        _require_bits(model, reference)
        assert optimizer.param_groups[0]["count"] == 4


def test_what_is_kept_in_groups_is_saved_and_loaded(
    rank_pool: Pools, tmp_path: pathlib.Path
) -> None:
    full, *_ = rank_pool(4).run(_save_counts, str(tmp_path))
    assert full["param_groups"][0]["count"] == 3
    rank_pool(2).run(_continue_counts, full, str(tmp_path))


class Estimating(Counting):
    """Keeps a value in each group that depends on all parameters of the group."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            group["size"] = sum(parameter.numel() for parameter in group["params"])


def _disagree(_rank: int, _world_size: int) -> None:
    model = _model()
    model.third.double()
    optimizer = ShardedOptimizer(model.parameters(), Estimating, lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with pytest.raises(OptimizerStateError, match="keeps 'size' in its groups"):
        optimizer.checkpoint_state(model)


def test_estimates_over_a_whole_group_are_refused_by_name(rank_pool: Pools) -> None:
    rank_pool(1).run(_disagree)


def _make_wrapped(kind: str, seed: int) -> tuple[nn.Module, ShardedOptimizer]:
    model = _model(seed)
    if kind == "zero2":
        model = ShardedDataParallel(model, 0.0016)
    elif kind == "ddp":
        model = BucketedDataParallel(model)
    return model, ShardedOptimizer(model.parameters(), AdamW, **ADAMW)


def _save_by_torch(_rank: int, _world_size: int, kind: str, full: bool, path: str) -> None:
    model, optimizer = _make_wrapped(kind, 0)
    for step in range(3):
        _step(model, optimizer, step)
    options = StateDictOptions(full_state_dict=full)
    before = optimizer.full_state_dict()
    weights, state = get_state_dict(model, optimizer, options=options)
    assert set(state["state"]) == {name for name, _ in Layered().named_parameters()}
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
    if before:  # Reading the state does not change it.
        _require_same_state(optimizer.full_state_dict(), before)
    else:
        optimizer.full_state_dict()


def _continue_by_torch(_rank: int, _world_size: int, kind: str, full: bool, path: str) -> None:
    reference = _model()
    plain = AdamW(reference.parameters(), **ADAMW)
    for step in range(3):
        _step(reference, plain, step)
    model, optimizer = _make_wrapped(kind, 5)
    weights, state = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": state}
    dcp.load(saved, checkpoint_id=path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=saved["model"],
        optim_state_dict=saved["optimizer"],
        options=StateDictOptions(full_state_dict=full),
    )
    for step in range(3, 5):
        _step(model, optimizer, step)
        _step(reference, plain, step)
    for own, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("kind", ["plain", "ddp", "zero2"])
def test_torchs_checkpoint_functions_take_the_optimizer(
    rank_pool: Pools, tmp_path: pathlib.Path, kind: str, full: bool
) -> None:
    rank_pool(4).run(_save_by_torch, kind, full, str(tmp_path))
    rank_pool(2).run(_continue_by_torch, kind, full, str(tmp_path))
