"""The fully sharded container's contract with training loops, optimizers and checkpoints."""

import copy
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from paceline.parallel import RankPool
from paceline.parallel.fsdp.container import FullyShardedDataParallel
from paceline.parallel.fsdp.layers import WrapPolicy
from tests import devices
from tests.distributed.toys import WIDTH, Layered, data, loss_of, oracle_backward

Pools = Callable[[int], RankPool]


class Model(nn.Module):
    """Blocks, a scalar, a transposed weight, a buffer, and a weight with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.turned = nn.Parameter(torch.randn(7, WIDTH).T)
        self.last = nn.Linear(7, 1)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor, _rank: int = 0) -> Tensor:
        for block in self.blocks:
            x = F.gelu(block(x))
        return self.last(x @ self.turned) * self.scale


def _pair(rank: int, model: type[nn.Module] = Model, **options: Any) -> tuple[Any, nn.Module]:
    torch.manual_seed(rank)
    ours = FullyShardedDataParallel(model(), **options)
    torch.manual_seed(0)
    return ours, model()


def _require_same(ours: FullyShardedDataParallel, oracle: nn.Module, tolerance: float) -> None:
    state = ours.full_state_dict()
    assert list(state) == list(oracle.state_dict())
    for name, expected in oracle.state_dict().items():
        assert type(state[name]) is Tensor
        torch.testing.assert_close(state[name], expected, atol=tolerance, rtol=tolerance, msg=name)


def _require_same_gradients(ours: nn.Module, oracle: nn.Module, tolerance: float = 1e-6) -> None:
    for (name, own), expected in zip(ours.named_parameters(), oracle.parameters(), strict=True):
        gradient = own.grad.full_tensor() if isinstance(own.grad, DTensor) else own.grad
        torch.testing.assert_close(
            gradient,
            expected.grad,
            atol=tolerance,
            rtol=tolerance,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def _shards(rank: int, world_size: int) -> None:
    ours, oracle = _pair(rank)
    for (name, own), expected in zip(ours.named_parameters(), oracle.parameters(), strict=True):
        assert isinstance(own, DTensor), name
        assert isinstance(own, nn.Parameter), name
        assert own.shape == expected.shape
        assert own.device_mesh.ndim == 1
        if name == "scale":
            assert own.placements == (Replicate(),)
            continue
        assert own.placements == (Shard(0),)
        chunks = expected.chunk(world_size)
        local = chunks[rank] if rank < len(chunks) else expected[:0]
        assert torch.equal(own.to_local(), local)
    # All parameters of a layer and dtype are views of one flat shard.
    block = ours.module.blocks[0]
    storages = {p.to_local().untyped_storage().data_ptr() for p in block.parameters()}
    assert len(storages) == 1


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_parameters_are_dtensors_over_one_flat_shard(rank_pool: Pools, world_size: int) -> None:
    rank_pool(world_size).run(_shards)


def _clip(rank: int, world_size: int, way: str, norm_type: float) -> None:
    ours, oracle = _pair(rank)
    loss_of(ours(data(0, rank), rank)).backward()
    oracle_backward(oracle, 0, world_size)
    expected = nn.utils.clip_grad_norm_(oracle.parameters(), 0.01, norm_type)
    if way == "torch":
        total = nn.utils.clip_grad_norm_(ours.parameters(), 0.01, norm_type).full_tensor()
    else:
        total = ours.clip_grad_norm_(0.01, norm_type)
    assert float(total) == pytest.approx(float(expected), rel=1e-6)
    _require_same_gradients(ours, oracle)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("way", "norm_type"),
    [("torch", 2.0), ("container", 2.0), ("container", 1.0), ("container", float("inf"))],
)
def test_clipping_is_that_of_one_process(
    rank_pool: Pools, way: str, norm_type: float, world_size: int
) -> None:
    rank_pool(world_size).run(_clip, way, norm_type)


def _nonfinite(rank: int, _world_size: int) -> None:
    ours, _ = _pair(rank)
    loss = loss_of(ours(data(0, rank), rank))
    (loss * (float("nan") if rank else 1.0)).backward()
    with pytest.raises(RuntimeError, match="norm of order 2 of all gradients is nan"):
        ours.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert torch.isnan(ours.clip_grad_norm_(1.0))


def test_a_norm_that_is_not_finite_is_an_error_on_every_rank_if_wanted(rank_pool: Pools) -> None:
    rank_pool(2).run(_nonfinite)


def _scale(rank: int, _world_size: int) -> tuple[bool, float]:
    torch.manual_seed(0)
    ours = FullyShardedDataParallel(nn.Sequential(nn.Linear(16, 16)))
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(devices.own_device().type, init_scale=4.0)
    before = ours.full_state_dict()
    # Only the gradient of the first row, which one rank holds, is not finite.
    factors = torch.ones(8, 16)
    factors[:, 0] = float("inf")
    scaler.scale((ours(torch.ones(8, 16)) * factors).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    after = ours.full_state_dict()
    return any(not torch.equal(before[name], after[name]) for name in before), scaler.get_scale()


def test_a_gradient_scaler_skips_the_step_on_all_ranks(rank_pool: Pools) -> None:
    assert rank_pool(2).run(_scale) == [(False, 2.0), (False, 2.0)]


def _decay_groups(rank: int, _world_size: int) -> None:
    ours, oracle = _pair(rank)
    decayed = [
        [name for name, parameter in model.named_parameters() if parameter.ndim >= 2]
        for model in (ours, oracle)
    ]
    assert decayed[0] == decayed[1]
    assert len(decayed[0]) == 5


def test_rules_by_dimension_find_the_groups_of_one_process(rank_pool: Pools) -> None:
    rank_pool(3).run(_decay_groups)


_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "loop": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, fused=True),
}


def _optimize(rank: int, world_size: int, implementation: str) -> None:
    ours, oracle = _pair(rank)
    optimizers = [_OPTIMIZERS[implementation](m.parameters()) for m in (ours, oracle)]
    for step in range(3):
        loss_of(ours(data(step, rank), rank)).backward()
        oracle_backward(oracle, step, world_size)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    _require_same(ours, oracle, 1e-5)


@pytest.mark.parametrize("implementation", _OPTIMIZERS)
def test_every_implementation_of_an_optimizer_takes_shards(
    rank_pool: Pools, implementation: str
) -> None:
    rank_pool(3).run(_optimize, implementation)


def _no_sync(rank: int, world_size: int, compute_dtype: torch.dtype | None) -> None:
    ours, oracle = _pair(rank, Layered, compute_dtype=compute_dtype)
    tolerance = 1e-6 if compute_dtype is None else 2e-2
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, oracle)]
    for step in range(0, 6, 3):
        with ours.no_sync():
            for micro in (step, step + 1):
                loss_of(ours(data(micro, rank), rank)).backward()
        assert all(parameter.grad is None for parameter in ours.parameters())
        loss_of(ours(data(step + 2, rank), rank)).backward()
        for micro in range(step, step + 3):
            oracle_backward(oracle, micro, world_size)
        _require_same_gradients(ours, oracle, tolerance)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
def test_passes_without_synchronisation_go_with_the_next_one(
    rank_pool: Pools, compute_dtype: torch.dtype | None
) -> None:
    rank_pool(3).run(_no_sync, compute_dtype)


def _weights(rank: int, world_size: int, weights: list[float]) -> None:
    ours, oracle = _pair(rank)
    ours.set_gradient_weight(weights[rank])
    loss = loss_of(ours(data(0, rank), rank))
    (loss * float("nan") if weights[rank] == 0 and any(weights) else loss).backward()
    total = sum(weights)
    for other in range(world_size):
        factor = weights[other] / total if total else 1 / world_size
        (loss_of(oracle(data(0, other), other)) * factor).backward()
    _require_same_gradients(ours, oracle)
    for model in (ours, oracle):
        model.zero_grad()
    loss_of(ours(data(1, rank), rank)).backward()
    oracle_backward(oracle, 1, world_size)
    _require_same_gradients(ours, oracle)


@pytest.mark.parametrize("weights", [[3.0, 1.0, 0.5], [0.0, 2.0, 1.0], [0.0, 0.0, 0.0]])
def test_ranks_count_for_their_weights(rank_pool: Pools, weights: list[float]) -> None:
    rank_pool(3).run(_weights, weights)


class _Idle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.idle = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        x = self.used(x)
        return x + self.bias if rank else x


def _explain(rank: int, world_size: int) -> list[tuple[str, tuple[int, ...]]]:
    ours, _ = _pair(rank, _Idle)
    ours.record_statistics()
    assert ours.synchronization_stats() is None
    loss_of(ours(data(0, rank), rank)).backward()
    stats = ours.synchronization_stats()
    assert stats is not None
    assert len(stats.buckets) == 2  # One for the root's bias, one for the layer that runs.
    # Each rank's rows and one number per parameter, padded to 16 bytes.
    rows = -(-WIDTH // world_size)
    shard = -(-rows * WIDTH // 4) * 4 + -(-rows // 4) * 4 + 4
    assert max(bucket.num_bytes for bucket in stats.buckets) == 4 * world_size * shard
    assert stats.backward_s >= 0
    assert stats.exposed_wait_s > 0
    with torch.no_grad():
        ours(data(0, rank), rank)
    assert ours.synchronization_stats() == stats  # Passes without gradients are ignored.
    assert ours.message_bytes() == [bucket.num_bytes for bucket in stats.buckets]
    return [(unused.name, unused.ranks) for unused in ours.explain_unused()]


def test_messages_waits_and_unused_parameters_are_told(rank_pool: Pools) -> None:
    unused = rank_pool(2).run(_explain)
    assert unused[0] == unused[1]
    assert sorted(unused[0]) == [("bias", (0,)), ("idle.bias", (0, 1)), ("idle.weight", (0, 1))]


def _load(rank: int, _world_size: int) -> None:
    ours, oracle = _pair(rank)
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.add_(1)
        oracle.seen.add_(2)
    ours.load_state_dict(oracle.state_dict())
    _require_same(ours, oracle, 0)
    torch.testing.assert_close(ours(data(0, rank)), oracle(data(0, rank)), atol=1e-6, rtol=1e-6)
    other = FullyShardedDataParallel(Model())
    other.load_state_dict(ours.state_dict())
    _require_same(other, oracle, 0)
    assert list(ours.state_dict()) == list(oracle.state_dict())
    assert ours.state_dict()._metadata == oracle.state_dict()._metadata
    with pytest.raises(RuntimeError, match=r"size mismatch for last\.weight"):
        ours.load_state_dict({**oracle.state_dict(), "last.weight": torch.zeros(2, 7)})
    with pytest.raises(Exception, match="load without assign=True"):
        ours.load_state_dict(oracle.state_dict(), assign=True)


@pytest.mark.parametrize("world_size", [1, 3])
def test_full_and_sharded_states_are_loaded(rank_pool: Pools, world_size: int) -> None:
    rank_pool(world_size).run(_load)


def _train_a_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss_of(model(data(7, 0), 0)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _save(rank: int, _world_size: int, path: Path) -> None:
    torch.manual_seed(0)
    ours = FullyShardedDataParallel(Model())
    optimizer = torch.optim.AdamW(ours.parameters(), lr=0.01)
    _train_a_step(ours, optimizer)
    state, optimizer_state = get_state_dict(ours, optimizer)
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=path)


def _resume(rank: int, _world_size: int, path: Path) -> None:
    torch.manual_seed(5)
    ours = FullyShardedDataParallel(Model())
    optimizer = torch.optim.AdamW(ours.parameters(), lr=0.01)
    state, optimizer_state = get_state_dict(ours, optimizer)
    dcp.load({"model": state, "optimizer": optimizer_state}, checkpoint_id=path)
    set_state_dict(ours, optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
    torch.manual_seed(0)
    oracle = Model()
    oracle_optimizer = torch.optim.AdamW(oracle.parameters(), lr=0.01)
    _train_a_step(oracle, oracle_optimizer)
    _require_same(ours, oracle, 1e-6)
    _train_a_step(ours, optimizer)
    _train_a_step(oracle, oracle_optimizer)
    _require_same(ours, oracle, 1e-6)
    full = get_model_state_dict(ours, options=StateDictOptions(full_state_dict=True))
    for name, expected in oracle.state_dict().items():
        torch.testing.assert_close(full[name], expected, atol=1e-6, rtol=1e-6)
    torch.manual_seed(6)
    other = FullyShardedDataParallel(Model())
    set_model_state_dict(other, full, options=StateDictOptions(full_state_dict=True))
    _require_same(other, oracle, 1e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("saved_by", [2, 4])
@pytest.mark.parametrize("loaded_by", [1, 3])
def test_a_checkpoint_continues_at_any_number_of_ranks(
    rank_pool: Pools, tmp_path: Path, saved_by: int, loaded_by: int
) -> None:
    rank_pool(saved_by).run(_save, tmp_path)
    rank_pool(loaded_by).run(_resume, tmp_path)


def _reset(module: nn.Module) -> None:
    if isinstance(module, Model):
        with torch.no_grad():
            module.scale.fill_(1.5)
            module.turned.fill_(0.25)
            module.seen.fill_(3)
    elif isinstance(module, nn.Linear):
        module.reset_parameters()


def _on_meta(rank: int, _world_size: int) -> None:
    with torch.device("meta"):
        modules = [Model() for _ in range(3)]
    torch.manual_seed(rank)
    ours = FullyShardedDataParallel(modules[0], initialize=_reset)
    assert ours.module.seen.tolist() == [3, 3, 3]
    states = [{name: value.sum().item() for name, value in ours.full_state_dict().items()}]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, states)
    assert gathered == [gathered[0]] * len(gathered)
    loss_of(ours(data(0, rank))).backward()
    loaded = FullyShardedDataParallel(modules[1], device=devices.own_device())
    with pytest.raises(Exception, match="have no values yet"):
        loaded(data(0, rank))
    loaded.load_state_dict(ours.full_state_dict())
    torch.testing.assert_close(loaded(data(0, rank)), ours(data(0, rank)))
    modules[2].last = nn.Linear(7, 1)
    with pytest.raises(Exception, match=r"is on the meta device and 'last\.bias' is not"):
        FullyShardedDataParallel(modules[2])


def test_a_model_on_the_meta_device_gets_values_from_a_function_or_a_state(
    rank_pool: Pools,
) -> None:
    rank_pool(3).run(_on_meta)


_BLOCKS, _BLOCK_WIDTH = 80, 1024
_MODEL_BYTES = _BLOCKS * _BLOCK_WIDTH**2 * 4
_LIMIT_BYTES = int(0.95 * _MODEL_BYTES)


class _Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Linear(_BLOCK_WIDTH, _BLOCK_WIDTH, bias=False) for _ in range(_BLOCKS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def _train_beyond_memory(rank: int, _world_size: int) -> None:
    warm = FullyShardedDataParallel(nn.Sequential(nn.Linear(_BLOCK_WIDTH, _BLOCK_WIDTH)))
    warm(torch.ones(2, _BLOCK_WIDTH)).sum().backward()
    torch.optim.SGD(warm.parameters(), lr=0.1).step()
    with torch.device("meta"):
        model = _Large()
    used = int(Path("/proc/self/status").read_text().split("VmSize:")[1].split()[0]) * 1024
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + _LIMIT_BYTES, before[1]))
    try:
        with pytest.raises(RuntimeError, match="memory"):
            torch.ones(_MODEL_BYTES // 4)
        ours = FullyShardedDataParallel(model, initialize=lambda part: part.reset_parameters())
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
        ours(torch.ones(2, _BLOCK_WIDTH)).square().mean().backward()
        assert torch.isfinite(ours.clip_grad_norm_(1.0))
        optimizer.step()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.host("a limit of the host's memory")
@pytest.mark.slow
def test_a_model_larger_than_a_ranks_memory_trains(rank_pool: Pools) -> None:
    # Shards and their gradients take half of the model's bytes. The rest is room for a few layers
    # and for address space that an allocator reserves without using it.
    rank_pool(4).run(_train_beyond_memory)


def _two_dimensions(rank: int, world_size: int) -> None:
    mesh = init_device_mesh(
        devices.own_device().type, (2, 2), mesh_dim_names=("replicate", "shard")
    )
    ours, oracle = _pair(rank, process_group=mesh)
    weight = ours.module.blocks[0].weight
    assert weight.placements == (Replicate(), Shard(0))
    assert weight.to_local().shape == (WIDTH // 2, WIDTH)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, oracle)]
    for step in range(3):
        loss_of(ours(data(step, rank), rank)).backward()
        oracle_backward(oracle, step, world_size)
        norms = [ours.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(oracle.parameters(), 0.1)]
        assert float(norms[0]) == pytest.approx(float(norms[1]), rel=1e-6)
        _require_same_gradients(ours, oracle)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    _require_same(ours, oracle, 1e-6)


def test_a_mesh_of_two_dimensions_replicates_and_shards(rank_pool: Pools) -> None:
    rank_pool(4).run(_two_dimensions)


class _Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


class _Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _Inner(), _Inner()
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, _rank: int) -> Tensor:
        return self.second(self.first(x)) * self.gain


def _policies(rank: int, world_size: int, name: str) -> None:
    torch.manual_seed(0)
    model = _Outer()
    policy, num_layers = {
        "default": (None, 5),
        "class": (WrapPolicy(classes=(_Inner,)), 3),
        "list": (WrapPolicy(modules=(model.first,)), 4),
        "replicated": (WrapPolicy(classes=(nn.Linear,), rest="replicated"), 3),
    }[name]
    oracle = copy.deepcopy(model)
    ours = FullyShardedDataParallel(model, wrap=policy)
    assert len(ours._layers) == num_layers
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, oracle)]
    for step in range(3):
        loss_of(ours(data(step, rank), rank)).backward()
        oracle_backward(oracle, step, world_size)
        _require_same_gradients(ours, oracle)
        if name == "replicated":
            assert isinstance(ours.module.gain, nn.Parameter)
            assert not isinstance(ours.module.gain, DTensor)
            assert type(ours.module.first.norm.weight.grad) is Tensor
            norms = (ours.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(oracle.parameters(), 0.1))
            assert float(norms[0]) == pytest.approx(float(norms[1]), rel=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    _require_same(ours, oracle, 1e-6)


@pytest.mark.parametrize("name", ["default", "class", "list", "replicated"])
def test_a_policy_says_what_a_layer_is(rank_pool: Pools, name: str) -> None:
    rank_pool(3).run(_policies, name)


def _dtypes(rank: int, world_size: int) -> None:
    ours, _ = _pair(
        rank,
        Layered,
        compute_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        output_dtype=torch.float32,
    )
    output = ours(data(0, rank), rank)
    assert output.dtype == torch.float32
    loss_of(output).backward()
    third = 4 * world_size * (-(-WIDTH // world_size) * 40 + 4 + 4)
    assert ours.message_bytes()[0] == third
    for parameter in ours.parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32


def test_dtypes_of_computing_sending_and_returning_are_apart(rank_pool: Pools) -> None:
    rank_pool(3).run(_dtypes)


def _gathers(rank: int, _world_size: int, options: dict[str, Any]) -> tuple[int, int, int]:
    torch.manual_seed(0)
    ours = FullyShardedDataParallel(
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6))), **options
    )
    present: list[int] = []
    for module in ours.module:
        module.register_forward_pre_hook(
            lambda *_: present.append(sum(layer.num_present_bytes > 0 for layer in ours._layers))
        )
    for _ in range(2):
        present.clear()
        output = ours(data(0, rank))
        after = sum(layer.num_present_bytes > 0 for layer in ours._layers)
        output.sum().backward()
    return max(present), present[0], after


def test_how_much_is_gathered_is_chosen(rank_pool: Pools) -> None:
    pool = rank_pool(2)
    assert pool.run(_gathers, {})[0] == (3, 3, 1)
    assert pool.run(_gathers, {"prefetch": 0})[0] == (1, 1, 1)
    assert pool.run(_gathers, {"prefetch": 4})[0] == (5, 5, 1)
    assert pool.run(_gathers, {"reshard_after_forward": False})[0] == (6, 3, 6)


def _groups_in_turn(rank: int, world_size: int) -> None:
    for _ in range(2):
        group = dist.new_group(list(range(world_size)))
        ours = FullyShardedDataParallel(Layered(), process_group=group)
        full = ours.full_state_dict()
        for name, parameter in ours.named_parameters():
            assert torch.equal(parameter.full_tensor(), full[name])
        del ours, parameter
        dist.destroy_process_group(group)


def test_shards_of_a_group_are_not_taken_for_those_of_one_that_is_gone(rank_pool: Pools) -> None:
    rank_pool(2).run(_groups_in_turn)
