"""Compares reduce-scattered gradients (ZeRO-2) with one process with all data."""

import copy
import functools
import gc
import io
import pathlib
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.core.errors import UsageError
from paceline.parallel import BucketedDataParallel, RankPool, ShardedDataParallel, ShardedOptimizer
from paceline.parallel.buckets import GradientError
from paceline.parallel.zero.bucket import ReducedGradient
from tests import devices
from tests.distributed.device_pool import DevicePool
from tests.distributed.test_sharded_in_flight import spoilt_in_flight
from tests.distributed.toys import (
    MODELS,
    WIDTH,
    Layered,
    data,
    loss_of,
    oracle_backward,
    require_identical,
)

Pools = Callable[[int], RankPool]

SGD_OPTIONS = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}
SMALL_BUCKET_MB = 0.0016


def _pair(
    rank: int, model: str, optimizer_cls: type[Optimizer] = SGD, **keywords: Any
) -> tuple[ShardedDataParallel, Optimizer, nn.Module, Optimizer]:
    options = SGD_OPTIONS if optimizer_cls is SGD else {"lr": 0.01, "weight_decay": 0.1}
    keywords.setdefault("bucket_size_mb", SMALL_BUCKET_MB)
    torch.manual_seed(rank)
    ours = ShardedDataParallel(MODELS[model](), **keywords)
    torch.manual_seed(0)
    oracle = MODELS[model]()
    return (
        ours,
        ShardedOptimizer(ours.parameters(), optimizer_cls, **options),
        oracle,
        optimizer_cls(oracle.parameters(), **options),
    )


def _step_and_clear(*optimizers: Optimizer) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _require_close(ours: nn.Module, oracle: nn.Module, tolerance: float = 1e-6) -> None:
    for (name, own), expected in zip(ours.named_parameters(), oracle.parameters(), strict=True):
        require_identical(own.detach(), name)
        torch.testing.assert_close(
            own.detach(),
            expected.detach(),
            atol=tolerance,
            rtol=tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def _train(rank: int, world_size: int, model: str, bucket: float | None) -> None:
    ours, sharded, oracle, whole = _pair(rank, model, bucket_size_mb=bucket)
    for step in range(4):
        loss_of(ours(data(step, rank), rank)).backward()
        ours.finish_gradient_synchronization()
        oracle_backward(oracle, step, world_size)
        for optimizer in (sharded, whole):
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        if step % 2:  # After other steps the next forward pass has to wait.
            _require_close(ours, oracle)
    _require_close(ours, oracle)


@pytest.mark.sampled(17)
@pytest.mark.parametrize("world_size", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.filterwarnings("ignore::paceline.parallel.OverlapWarning")
def test_training_equals_one_process(rank_pool: Pools, model: str, world_size: int) -> None:
    rank_pool(world_size).run(_train, model, SMALL_BUCKET_MB)


def test_one_bucket(rank_pool: Pools) -> None:
    rank_pool(3).run(_train, "layered", None)


def _equal_bucketed(rank: int, world_size: int) -> None:
    """Requires bitwise equality with torch's DDP: two summands have only one order."""
    ours, sharded, oracle, whole = _pair(rank, "layered", AdamW)
    theirs = nn.parallel.DistributedDataParallel(oracle)
    for step in range(5):
        for model, optimizer in ((ours, sharded), (theirs, whole)):
            optimizer.zero_grad()
            loss_of(model(data(step, rank), rank)).backward()
            optimizer.step()
        for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(own, other)


def test_two_ranks_equal_torch_to_the_bit(rank_pool: Pools) -> None:
    rank_pool(2).run(_equal_bucketed)


def _accumulate(rank: int, world_size: int, model: str, way: str) -> None:
    ours, sharded, oracle, whole = _pair(rank, model)
    for step in range(0, 6, 3):
        for micro in (step, step + 1):
            if way == "no_sync":
                with ours.no_sync():
                    loss_of(ours(data(micro, rank), rank)).backward()
            else:
                loss_of(ours(data(micro, rank), rank)).backward()
        loss_of(ours(data(step + 2, rank), rank)).backward()
        for micro in range(step, step + 3):
            oracle_backward(oracle, micro, world_size)
        _step_and_clear(sharded, whole)
        _require_close(ours, oracle)


@pytest.mark.parametrize("way", ["no_sync", "twice"])
@pytest.mark.parametrize("model", ["layered", "unused_on_one_rank", "unused"])
@pytest.mark.filterwarnings("ignore::paceline.parallel.OverlapWarning")
def test_several_backward_passes_accumulate(rank_pool: Pools, model: str, way: str) -> None:
    rank_pool(3).run(_accumulate, model, way)


def _clear_through_the_model(rank: int, world_size: int) -> None:
    ours, sharded, oracle, whole = _pair(rank, "layered")
    for step in range(3):
        for model in (ours, oracle):
            model.zero_grad(set_to_none=step % 2 == 0)
        loss_of(ours(data(step, rank), rank)).backward()
        oracle_backward(oracle, step, world_size)
        sharded.step()
        whole.step()
    _require_close(ours, oracle)


def test_the_models_zero_grad_clears_shards(rank_pool: Pools) -> None:
    rank_pool(2).run(_clear_through_the_model)


def _weigh(rank: int, world_size: int) -> None:
    ours, sharded, oracle, whole = _pair(rank, "layered")
    weights = [1.0, 3.0, 0.0][:world_size]
    ours.set_gradient_weight(weights[rank])
    loss_of(ours(data(0, rank), rank)).backward()
    total = sum(w * loss_of(oracle(data(0, r), r)) for r, w in enumerate(weights))
    (total / sum(weights)).backward()
    sharded.step()
    whole.step()
    _require_close(ours, oracle)


def test_ranks_count_by_their_weights(rank_pool: Pools) -> None:
    rank_pool(3).run(_weigh)


class ReadsOthers(nn.Module):
    """Modules that read parameters of other modules without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.scales = nn.ParameterList([torch.ones(WIDTH), torch.ones(WIDTH)])
        self.normed = nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.shared = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.attention(x, x, x, need_weights=False)
        y = self.normed(y * self.scales[0]) * self.scales[1]
        return nn.functional.linear(y, self.shared.weight)


def _read_others(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    ours = ShardedDataParallel(ReadsOthers(), SMALL_BUCKET_MB / 8)
    torch.manual_seed(0)
    oracle = ReadsOthers()
    sharded = ShardedOptimizer(ours.parameters(), SGD, lr=0.1)
    whole = SGD(oracle.parameters(), lr=0.1)
    inputs = [data(0, r).reshape(2, 3, WIDTH) for r in range(world_size)]
    with spoilt_in_flight():
        for _ in range(3):
            ours(inputs[rank]).square().mean().backward()
            (sum(oracle(x).square().mean() for x in inputs) / world_size).backward()
            _step_and_clear(sharded, whole)
        sharded.step()
        part = ours.module.attention.state_dict()
        assert all(bool(value.isfinite().all()) for value in part.values())
        _require_close(ours, oracle)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_no_layer_reads_what_is_under_way(rank_pool: Pools) -> None:
    rank_pool(2).run(_read_others)


def _copy_module(rank: int, world_size: int) -> None:
    ours, sharded, _, _ = _pair(rank, "layered")
    loss_of(ours(data(0, rank), rank)).backward()
    sharded.step()
    ours.wait_for_parameters()
    average = copy.deepcopy(ours.module)
    content = io.BytesIO()
    torch.save(ours.module, content)
    for own, other in zip(ours.parameters(), average.parameters(), strict=True):
        assert torch.equal(own, other)
    loss_of(average(data(0, rank), rank)).backward()
    # The module outlives its container and trains under another.
    inner = ours.module
    del ours, sharded
    gc.collect()
    torch.manual_seed(0)
    oracle = Layered()
    oracle.load_state_dict(inner.state_dict())
    inner.zero_grad()
    again = BucketedDataParallel(inner)
    optimizers = ShardedOptimizer(again.parameters(), SGD, lr=0.1), SGD(oracle.parameters(), lr=0.1)
    loss_of(again(data(1, rank), rank)).backward()
    oracle_backward(oracle, 1, world_size)
    for optimizer in optimizers:
        optimizer.step()
    _require_close(again, oracle)


def test_the_module_is_copied_and_wrapped_anew(rank_pool: Pools) -> None:
    rank_pool(2).run(_copy_module)


def _keep_a_graph(rank: int, _world_size: int) -> None:
    ours, sharded, _, _ = _pair(rank, "layered")
    loss = loss_of(ours(data(0, rank), rank))
    loss.backward(retain_graph=True)
    sharded.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_graph_of_old_parameters_is_refused(rank_pool: Pools) -> None:
    with DevicePool(1, timeout_s=60) as pool:
        pool.run(_keep_a_graph)


def _clip_little(rank: int, _world_size: int) -> None:
    ours = ShardedDataParallel(nn.Linear(2, 1, bias=False))
    ours(torch.ones(3, 2)).sum().backward()
    norm = ours.clip_grad_norm_(1.0)
    torch.testing.assert_close(norm.float(), torch.tensor(18.0).sqrt())


def test_ranks_without_gradients_clip_as_well(rank_pool: Pools) -> None:
    rank_pool(4).run(_clip_little)


def _wide_sums(rank: int, world_size: int) -> None:
    """Sums 1 and three times 2^-9: summed in bf16, the result would stay 1; in float32 it grows."""
    ours = ShardedDataParallel(
        nn.Linear(4, 1, bias=False).bfloat16(), reduction_dtype=torch.float32
    )
    sharded = ShardedOptimizer(ours.parameters(), SGD, lr=1.0)
    scale = [1.0, 2.0**-9, 2.0**-9, 2.0**-9][rank] * world_size
    (ours(torch.ones(1, 4).bfloat16()) * scale).sum().backward()
    expected = torch.tensor(1 + 3 * 2.0**-9).bfloat16()
    assert expected != 1
    for shard in sharded.shards():
        assert shard.tensor.grad is not None
        assert bool((shard.tensor.grad == expected).all())


def test_a_wider_reduction_dtype_is_summed_in(rank_pool: Pools) -> None:
    rank_pool(4).run(_wide_sums)


def _clip(rank: int, world_size: int, norm_type: float, max_norm: float) -> None:
    ours, sharded, oracle, whole = _pair(rank, "layered")
    for step in range(3):
        loss_of(ours(data(step, rank), rank)).backward()
        oracle_backward(oracle, step, world_size)
        norm = ours.clip_grad_norm_(max_norm, norm_type)
        expected = nn.utils.clip_grad_norm_(oracle.parameters(), max_norm, norm_type)
        torch.testing.assert_close(norm.float(), expected, rtol=1e-5, atol=1e-7)
        _step_and_clear(sharded, whole)
        _require_close(ours, oracle)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("norm_type", "max_norm"), [(2.0, 0.01), (2.0, 1e3), (float("inf"), 0.01)])
def test_the_norm_of_owned_shards_is_that_of_all(
    rank_pool: Pools, norm_type: float, max_norm: float, world_size: int
) -> None:
    rank_pool(world_size).run(_clip, norm_type, max_norm)


def _skip(rank: int, world_size: int) -> None:
    ours, sharded, oracle, whole = _pair(rank, "layered")
    for step in range(4):
        spoilt = float("nan") if step == 2 and rank == 1 else 1.0
        (loss_of(ours(data(step, rank), rank)) * spoilt).backward()
        if step != 2:
            oracle_backward(oracle, step, world_size)
            whole.step()
            whole.zero_grad()
        norm = ours.clip_grad_norm_(1e9)
        assert bool(norm.isfinite()) == (step != 2)
        if norm.isfinite():
            sharded.step()
        sharded.zero_grad()
    _require_close(ours, oracle)


def test_a_step_that_is_not_finite_is_left_out(rank_pool: Pools) -> None:
    rank_pool(2).run(_skip)


def _master(rank: int, world_size: int) -> None:
    """Trains with updates that are lost in bf16, but not in its float32 master."""
    torch.manual_seed(0)
    ours = ShardedDataParallel(
        Layered().to(torch.bfloat16), SMALL_BUCKET_MB, master_dtype=torch.float32
    )
    sharded = ShardedOptimizer(ours.parameters(), SGD, lr=1e-3)
    first = {name: p.detach().float().clone() for name, p in ours.named_parameters()}
    sums = {name: torch.zeros_like(value) for name, value in first.items()}
    for step in range(30):
        copies = []
        for other in range(world_size):
            # The gradients that each rank computes with the same bf16 weights.
            alone = Layered().to(torch.bfloat16)
            alone.load_state_dict(ours.module.state_dict())
            loss_of(alone(data(step % 3, other).bfloat16(), other)).backward()
            copies.append({name: p.grad.float() for name, p in alone.named_parameters()})
        for name in sums:
            sums[name] += sum(copy[name.removeprefix("module.")] for copy in copies) / world_size
        loss_of(ours(data(step % 3, rank).bfloat16(), rank)).backward()
        sharded.step()
        sharded.zero_grad()
    for name, parameter in ours.named_parameters():
        assert parameter.dtype == torch.bfloat16
        expected = (first[name] - 1e-3 * sums[name]).bfloat16()
        torch.testing.assert_close(parameter.detach(), expected, rtol=0.01, atol=1e-4)
        require_identical(parameter.detach(), name)
    assert all(shard.tensor.dtype == torch.float32 for shard in sharded.shards())
    # Weights loaded into the model reach the master too.
    ours.module.load_state_dict({name: torch.ones_like(p) for name, p in alone.named_parameters()})
    assert all(bool((shard.tensor == 1).all()) for shard in sharded.shards())


def test_sixteen_bit_parameters_have_a_master(rank_pool: Pools) -> None:
    rank_pool(2).run(_master)


def _save(rank: int, _world_size: int, master: bool, path: str) -> dict[str, Any]:
    dtype = torch.bfloat16 if master else torch.float32
    torch.manual_seed(0)
    ours = ShardedDataParallel(
        Layered().to(dtype), SMALL_BUCKET_MB, master_dtype=torch.float32 if master else None
    )
    sharded = ShardedOptimizer(ours.parameters(), AdamW, lr=0.01)
    for step in range(6):
        if step == 3:
            saved = {"model": ours.state_dict(), "optimizer": sharded.checkpoint_state(ours)}
            dcp.save(saved, checkpoint_id=path)
        loss_of(ours(data(step, 7).to(dtype), rank)).backward()
        sharded.step()
        sharded.zero_grad()
    return {name: p.detach().clone() for name, p in ours.named_parameters()}


def _load(path: str, model: nn.Module, optimizer: ShardedOptimizer) -> None:
    saved = {"model": model.state_dict()}
    dcp.load(saved, checkpoint_id=path)
    model.load_state_dict(saved["model"])
    optimizer.load_checkpoint(model, dcp.FileSystemReader(path))


def _continue(rank: int, _world_size: int, end: dict[str, Tensor], master: bool, path: str) -> None:
    dtype = torch.bfloat16 if master else torch.float32
    torch.manual_seed(5)
    ours = ShardedDataParallel(
        Layered().to(dtype), None, master_dtype=torch.float32 if master else None
    )
    sharded = ShardedOptimizer(ours.parameters(), AdamW, lr=0.5)
    _load(path, ours, sharded)
    for step in range(3, 6):
        # All ranks have the same data, so that their number makes no difference.
        loss_of(ours(data(step, 7).to(dtype), rank)).backward()
        sharded.step()
        sharded.zero_grad()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter.detach().cpu(), end[name], rtol=1e-5, atol=1e-6, msg=name
        )


# Dividing a bf16 gradient by three rounds it, which Adam amplifies; dividing by two is exact.
@pytest.mark.parametrize(
    ("master", "world_size"), [(False, 1), (False, 2), (False, 3), (True, 1), (True, 2)]
)
def test_saved_by_four_ranks_continued_by_fewer(
    rank_pool: Pools, tmp_path: pathlib.Path, master: bool, world_size: int
) -> None:
    end, *_ = rank_pool(4).run(_save, master, str(tmp_path))
    rank_pool(world_size).run(_continue, end, master, str(tmp_path))


def _save_groups(rank: int, _world_size: int, path: str) -> dict[str, Any]:
    torch.manual_seed(0)
    ours = ShardedDataParallel(Layered(), SMALL_BUCKET_MB)
    weights = [p for p in ours.parameters() if p.dim() > 1]
    sharded = ShardedOptimizer(weights, AdamW, lr=0.01)
    sharded.add_param_group({"params": [p for p in ours.parameters() if p.dim() == 1]})
    loss_of(ours(data(0, 7), rank)).backward()
    sharded.step()
    state = {"model": ours.state_dict(), "optimizer": sharded.checkpoint_state(ours)}
    dcp.save(state, checkpoint_id=path)
    return sharded.full_state_dict()


def _load_groups(rank: int, _world_size: int, full: dict[str, Any], path: str) -> None:
    models = [Layered(), Layered()]
    groups = [
        [{"params": [p for p in m.parameters() if (p.dim() > 1) == wide]} for wide in (True, False)]
        for m in models
    ]
    sharded = ShardedOptimizer(groups[0], AdamW, lr=0.5)
    _load(path, models[0], sharded)
    models[1].load_state_dict(models[0].state_dict())
    whole = AdamW(groups[1], lr=0.5)
    whole.load_state_dict(copy.deepcopy(full))  # All ranks received the same shared memory.
    for model, optimizer in zip(models, (sharded, whole), strict=True):
        loss_of(model(data(1, 7), rank)).backward()
        optimizer.step()
    for own, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(own, other)


def test_groups_of_sharded_parameters_are_saved(rank_pool: Pools, tmp_path: pathlib.Path) -> None:
    full, *others = rank_pool(4).run(_save_groups, str(tmp_path))
    assert others == [{}] * 3
    assert len(full["state"]) == 5
    rank_pool(2).run(_load_groups, full, str(tmp_path))


def _memory(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(8)))
    total = sum(parameter.nbytes for parameter in model.parameters())
    ours = ShardedDataParallel(model, bucket_size_mb=0.0626)
    sharded = ShardedOptimizer(ours.parameters(), AdamW, lr=0.01)
    for _ in range(2):
        ours(torch.randn(4, 128)).square().mean().backward()
        assert all(type(parameter.grad) is ReducedGradient for parameter in model.parameters())
        gradients = sum(gradient.nbytes for gradient in sharded.gradient_tensors())
        assert gradients == total // world_size
        sharded.step()
        sharded.zero_grad()
    state = sum(tensor.nbytes for tensor in sharded.state_tensors() if tensor.dim())
    assert state == 2 * total // world_size


def test_gradients_and_state_are_divided(rank_pool: Pools) -> None:
    rank_pool(2).run(_memory)
    rank_pool(4).run(_memory)


def _refuse(rank: int, _world_size: int) -> None:
    with pytest.raises(UsageError, match="bucket_size_mb"):
        ShardedDataParallel(Layered(), 0)
    plain = ShardedDataParallel(Layered())
    loss_of(plain(data(0, rank), rank)).backward()
    with pytest.raises(UsageError, match=r"update with a ShardedOptimizer"):
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
    with pytest.raises(UsageError, match="no ShardedOptimizer updates the shards"):
        plain(data(1, rank), rank)
    frozen = Layered()
    frozen.second.weight.requires_grad_(False)
    later = ShardedDataParallel(frozen)
    frozen.second.weight.requires_grad_(True)
    with pytest.raises(UsageError, match=r"'second.weight' was frozen"):
        later(data(0, rank), rank)
    with pytest.raises(UsageError, match="elementwise"):
        ShardedOptimizer(later.parameters(), torch.optim.Adafactor)
    first = ShardedOptimizer(later.parameters(), SGD, lr=0.1)
    with pytest.raises(UsageError, match="another ShardedOptimizer"):
        ShardedOptimizer(later.parameters(), SGD, lr=0.1)
    del first
    ShardedOptimizer(later.parameters(), SGD, lr=0.1)
    sparse = ShardedDataParallel(nn.Embedding(10, 4, sparse=True))
    with pytest.raises(GradientError, match="sparse"):
        sparse(torch.tensor([1])).sum().backward()


def test_what_cannot_work_is_refused_by_name(rank_pool: Pools) -> None:
    pool = rank_pool(1)
    pool.run(_refuse)


def _groups_with_options(rank: int, world_size: int) -> None:
    ours, _, oracle, _ = _pair(rank, "layered")
    optimizers, schedulers = [], []
    del _
    gc.collect()
    for model, make in (
        (ours, functools.partial(ShardedOptimizer, optimizer_cls=AdamW)),
        (oracle, AdamW),
    ):
        weights = [p for p in model.parameters() if p.dim() > 1]
        biases = [p for p in model.parameters() if p.dim() == 1]
        optimizer = make([{"params": weights}, {"params": biases, "weight_decay": 0.0}], lr=0.01)
        optimizers.append(optimizer)
        schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    for step in range(4):
        loss_of(ours(data(step, rank), rank)).backward()
        oracle_backward(oracle, step, world_size)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    _require_close(ours, oracle, tolerance=1e-5)


def test_groups_and_schedulers(rank_pool: Pools) -> None:
    rank_pool(2).run(_groups_with_options)


def _is_freed(rank: int, _world_size: int) -> None:
    ours, sharded, _, _ = _pair(rank, "layered")
    loss_of(ours(data(0, rank), rank)).backward()
    sharded.step()
    ours.wait_for_parameters()
    reference = weakref.ref(ours)
    parameter = weakref.ref(next(iter(ours.parameters())))
    del ours, sharded
    gc.collect()
    assert reference() is None
    assert parameter() is None


def test_nothing_keeps_a_container_alive(rank_pool: Pools) -> None:
    rank_pool(2).run(_is_freed)


def _compiled(rank: int, world_size: int) -> None:
    ours, sharded, oracle, whole = _pair(rank, "layered")
    ours.module.second.compile(backend="eager")
    for step in range(3):
        loss_of(ours(data(step, rank), rank)).backward()
        oracle_backward(oracle, step, world_size)
        _step_and_clear(sharded, whole)
    _require_close(ours, oracle)


def test_compiled_layers(rank_pool: Pools) -> None:
    rank_pool(2).run(_compiled)


def _eval_between(rank: int, world_size: int) -> None:
    ours, sharded, oracle, whole = _pair(rank, "layered")
    for step in range(3):
        loss_of(ours(data(step, rank), rank)).backward()
        oracle_backward(oracle, step, world_size)
        _step_and_clear(sharded, whole)
        with torch.no_grad():
            torch.testing.assert_close(
                ours.module(data(5, 0), rank), oracle(data(5, 0), rank), atol=1e-6, rtol=1e-6
            )
    dist.barrier()


def test_evaluation_waits_for_parameters(rank_pool: Pools) -> None:
    rank_pool(2).run(_eval_between)


def _use_whole_gradients(rank: int, _world_size: int) -> None:
    ours, sharded, _, _ = _pair(rank, "layered")
    loss_of(ours(data(0, rank), rank)).backward()
    remedy = r"'first.weight' was reduce-scattered.* container's clip_grad_norm_"
    with pytest.raises(UsageError, match=remedy):
        nn.utils.clip_grad_norm_(ours.parameters(), 1.0)
    with pytest.raises(UsageError, match=remedy):
        nn.utils.clip_grad_value_(ours.parameters(), 1.0)
    with pytest.raises(UsageError, match=remedy):
        sum(parameter.grad.square().sum() for parameter in ours.parameters())
    scaler = torch.amp.GradScaler(devices.own_device().type)
    scaler.scale(torch.ones(()))
    with pytest.raises(UsageError, match="GradScaler, use BucketedDataParallel"):
        scaler.unscale_(sharded)
    assert "reduce-scattered" in repr(next(ours.parameters()).grad)
    (loss_of(ours(data(1, rank), rank)) * float("nan")).backward()
    with pytest.raises(RuntimeError, match="skip this step"):
        ours.clip_grad_norm_(1.0, error_if_nonfinite=True)
    for clear in (ours.zero_grad, sharded.zero_grad, ours.module.zero_grad):
        clear(set_to_none=False)
        clear()


def test_whole_gradients_are_refused_by_name(rank_pool: Pools) -> None:
    rank_pool(2).run(_use_whole_gradients)


def _wrap_again(rank: int, world_size: int) -> None:
    inner = Layered()
    ours = ShardedDataParallel(inner)
    sharded = ShardedOptimizer(ours.parameters(), SGD, lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(sharded, 1)
    loss_of(ours(data(0, rank), rank)).backward()
    sharded.step()
    gc.disable()
    try:
        del ours, sharded, schedule
        again = ShardedDataParallel(inner)
        ShardedOptimizer(again.parameters(), SGD, lr=0.1)
    finally:
        gc.enable()


def test_a_module_is_wrapped_again_when_its_container_is_dropped(rank_pool: Pools) -> None:
    rank_pool(2).run(_wrap_again)


def _edit_with_master(rank: int, _world_size: int, way: str) -> None:
    torch.manual_seed(0)
    ours = ShardedDataParallel(Layered().bfloat16(), SMALL_BUCKET_MB, master_dtype=torch.float32)
    sharded = ShardedOptimizer(ours.parameters(), SGD, lr=0.0)  # So that nothing else changes them.
    for step in range(3):
        loss_of(ours(data(step, rank).bfloat16(), rank)).backward()
        if step == 1 and way == "before the step":
            _fill(ours, 5.0)
        sharded.step()
        sharded.zero_grad()
        if step == 1 and way == "after the step":
            _fill(ours, 5.0)
    for parameter in ours.parameters():
        assert bool((parameter == 5.0).all())


@torch.no_grad()
def _fill(model: nn.Module, value: float) -> None:
    for parameter in model.parameters():
        parameter.fill_(value)


@pytest.mark.parametrize("way", ["before the step", "after the step"])
def test_edits_of_parameters_reach_their_master(rank_pool: Pools, way: str) -> None:
    rank_pool(2).run(_edit_with_master, way)


def _accumulate_without_clearing(rank: int, world_size: int) -> None:
    """Accumulates a no_sync pass after a synchronized one; two parameters share a gradient."""
    torch.manual_seed(0)
    ours = ShardedDataParallel(TwoBiases(), SMALL_BUCKET_MB)
    torch.manual_seed(0)
    oracle = TwoBiases()
    sharded = ShardedOptimizer(ours.parameters(), **SGD_OPTIONS, optimizer_cls=SGD)
    whole = SGD(oracle.parameters(), **SGD_OPTIONS)
    ours(data(0, rank)).square().mean().backward()
    with ours.no_sync():
        ours(data(1, rank)).square().mean().backward()
    ours(data(2, rank)).square().mean().backward()
    for step in range(3):
        total = sum(oracle(data(step, r)).square().mean() for r in range(world_size))
        (total / world_size).backward()
    _step_and_clear(sharded, whole)
    _require_close(ours, oracle)


class TwoBiases(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(6, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x + (self.first + self.second))


def test_gradients_are_added_to_reduced_ones(rank_pool: Pools) -> None:
    rank_pool(2).run(_accumulate_without_clearing)


class HostReads(TorchDispatchMode):
    """Records operators that would make the host wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        aten = torch.ops.aten
        if function in (aten._local_scalar_dense.default, aten.nonzero.default):
            self.found.append(str(function))
        return function(*arguments, **(keywords or {}))


def _read_nothing(rank: int, _world_size: int, model: str) -> None:
    ours, sharded, _, _ = _pair(rank, model)
    to_list = Tensor.tolist

    def read(tensor: Tensor) -> Any:
        reads.found.append("tolist")
        with torch._C.DisableTorchFunction():  # A mode would call this function a second time.
            return to_list(tensor)

    for step in range(3):
        with pytest.MonkeyPatch.context() as patch, HostReads() as reads:
            patch.setattr(Tensor, "tolist", read)
            with ours.no_sync():
                loss_of(ours(data(step, rank), rank)).backward()
            for micro in range(2):
                loss_of(ours(data(10 + micro, rank), rank)).backward()
            assert not reads.found
            ours.clip_grad_norm_(1.0)
            sharded.step()
            sharded.zero_grad()
        # A rank without a gradient for a shard reads once whether other ranks had one.
        may_ask = model == "unused_on_one_rank" and rank == 1
        assert reads.found in ([], ["tolist"] if may_ask else [])


@pytest.mark.parametrize("model", ["layered", "unused_on_one_rank"])
@pytest.mark.filterwarnings("ignore::paceline.parallel.OverlapWarning")
def test_the_host_reads_nothing_from_the_first_forward_to_the_step(
    rank_pool: Pools, model: str
) -> None:
    rank_pool(2).run(_read_nothing, model)
