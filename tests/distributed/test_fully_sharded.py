"""Compares the fully sharded container with one process with all data; checks its memory."""

import copy
import gc
import pickle
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from paceline.core.specs import ModelShape
from paceline.devices import accelerator
from paceline.models import TransformerLM
from paceline.parallel import RankPool
from paceline.parallel.dtensor import local_tensor
from paceline.parallel.fsdp.container import FullyShardedDataParallel
from paceline.parallel.fsdp.layer import ShardedLayer
from tests import devices
from tests.distributed.toys import MODELS, WIDTH, Layered, Shapes, data, loss_of

Pools = Callable[[int], RankPool]

VOCABULARY = 13


class RealShapes(Shapes):
    """A scalar, an empty tensor, several kinds of strides, and two dtypes; none is complex."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(WIDTH))


class ToyLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.norm = nn.RMSNorm(8, eps=1e-5)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, x: Tensor, _rank: int) -> Tensor:
        return self.head(self.norm(self.embedding(_tokens(x))))


class Transformer(nn.Module):
    def __init__(self, **keywords: Any) -> None:
        super().__init__()
        shape = ModelShape(vocab_size=VOCABULARY, d_model=8, d_ff=12, num_layers=4, num_heads=2)
        self.language_model = TransformerLM(shape, **keywords).to(torch.empty(0).device)

    def forward(self, x: Tensor, _rank: int) -> Tensor:
        return self.language_model(_tokens(x))


class Blocks(nn.Module):
    """Seven identical layers, so that gathered layers can be counted."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(7))

    def forward(self, x: Tensor, _rank: int) -> Tensor:
        for block in self.blocks:
            x = F.gelu(block(x))
        return x


class Nested(nn.Module):
    """Parameters of the root, of lists, and of a module that contains a layer; some are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.shifts = nn.ParameterList(torch.randn(WIDTH) for _ in range(2))
        self.inner = Outer()
        self.groups = nn.ModuleList(
            nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH)})
            for _ in range(2)
        )
        self.groups[1]["b"].weight = self.inner.layer.weight
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.also_direct = self.twice.weight

    def forward(self, x: Tensor, _rank: int) -> Tensor:
        x = self.inner(self.twice(x) * self.scale) + self.shifts[0]
        for group in self.groups:
            x = x + group["b"](F.gelu(group["a"](x)))
        return F.linear(self.twice(x), self.also_direct) * self.shifts[1]


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(WIDTH))
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.gain


class Recurrent(nn.Module):
    """An LSTM, which also keeps its parameters in a separate list."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH)

    def forward(self, x: Tensor, _rank: int) -> Tensor:
        return self.lstm(x)[0]


class Segments(nn.Module):
    """Activation checkpoints of two layers each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, _rank: int) -> Tensor:
        for index in (0, 2):
            first, second = self.blocks[index : index + 2]
            x = checkpoint(
                lambda y, a=first, b=second: F.gelu(b(F.gelu(a(y)))), x, use_reentrant=False
            )
        return x


class InsideAndOutside(nn.Module):
    """A layer whose gradient arrives twice, the second time after the first has been sent."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.between = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, _rank: int) -> Tensor:
        x = checkpoint(self.layer, x.clone().requires_grad_(), use_reentrant=True)
        return self.layer(F.gelu(self.between(x)))


class BiasByRank(nn.Module):
    """All ranks run the same layers, but their losses depend on different parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Biased() for _ in range(3))
        self.side = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x, rank == index)
        side = self.side(x)
        return x if rank == 1 else x + side


class DetachedByRank(Blocks):
    """Ends the backward pass of rank 1 halfway."""

    def forward(self, x: Tensor, rank: int) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = F.gelu(block(x))
            if rank == 1 and index == 3:
                x = x.detach()
        return x


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.idle = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, with_bias: bool) -> Tensor:
        return F.gelu(F.linear(x, self.weight, self.bias if with_bias else None))


OWN_MODELS: dict[str, Callable[[], nn.Module]] = {
    **{
        name: MODELS[name]
        for name in (
            "layered",
            "frozen",
            "tied",
            "unused",
            "branching",
            "checkpoint",
            "reentrant_checkpoint",
            "shared_reentrant_checkpoint",
        )
    },
    "shapes": RealShapes,
    "language": ToyLM,
    "transformer": Transformer,
    "checkpointed_transformer": lambda: Transformer(activation_checkpointing="full"),
    "nested": Nested,
    "recurrent": Recurrent,
    "segments": Segments,
    "inside_and_outside": InsideAndOutside,
    "bias_by_rank": BiasByRank,
    "detached_by_rank": DetachedByRank,
}


def _tokens(x: Tensor) -> Tensor:
    return (x.float() * 1000).long() % VOCABULARY


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    # Momentum and weight decay update a parameter with a zero gradient, but not one without any.
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1),
    # A large epsilon; with a small one, gradients near zero become steps of either sign.
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, eps=1e-3),
}


def _make_pair(
    rank: int, model: str, **keywords: Any
) -> tuple[FullyShardedDataParallel, nn.Module]:
    """Returns a container, built from weights that differ by rank, and its oracle."""
    torch.manual_seed(rank)
    container = FullyShardedDataParallel(OWN_MODELS[model](), **keywords)
    torch.manual_seed(0)
    return container, OWN_MODELS[model]()


def _oracle_backward(oracle: nn.Module, step: int, world_size: int) -> None:
    for rank in range(world_size):
        (loss_of(oracle(data(step, rank), rank)) / world_size).backward()


def _require_close(container: FullyShardedDataParallel, oracle: nn.Module) -> None:
    """Compares full gradients and values."""
    _require_close_gradients(container, oracle)
    _require_close_values(container, oracle)


def _require_close_values(container: FullyShardedDataParallel, oracle: nn.Module) -> None:
    expected = dict(oracle.named_parameters())
    gathered = _full_parameters(container)
    assert list(gathered) == list(expected)
    for name, full in gathered.items():
        _require_close_tensor(full, expected[name], f"value of {name}")


def _require_close_gradients(container: FullyShardedDataParallel, oracle: nn.Module) -> None:
    shards = dict(container.module.named_parameters())
    expected = dict(oracle.named_parameters())
    assert list(shards) == list(expected)
    for name, shard in shards.items():
        assert shard.shape == expected[name].shape
        assert shard.dtype == expected[name].dtype
        assert shard.requires_grad == expected[name].requires_grad
        assert (shard.grad is None) == (expected[name].grad is None), name
        if shard.grad is not None:
            assert shard.grad.shape == shard.shape
            assert shard.grad.dtype == shard.dtype
            gradient = shard.grad.full_tensor()
            _require_close_tensor(gradient, expected[name].grad, f"gradient of {name}")


def _full_parameters(container: FullyShardedDataParallel) -> dict[str, Tensor]:
    state = container.full_state_dict()
    return {name: state[name] for name, _ in container.module.named_parameters()}


def _require_close_tensor(own: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(
        own, expected.detach(), atol=1e-6, rtol=1e-6, msg=lambda text: f"{what}: {text}"
    )


def _present(container: FullyShardedDataParallel) -> list[ShardedLayer]:
    """Returns the layers whose full parameters have memory."""
    return [layer for layer in container._layers if layer.num_present_bytes]


def _train(rank: int, world_size: int, model: str, optimizer_name: str) -> None:
    ours, oracle = _make_pair(rank, model)
    optimizers = [OPTIMIZERS[optimizer_name](m.parameters()) for m in (ours, oracle)]
    for step in range(5):
        loss_of(ours(data(step, rank), rank)).backward()
        _oracle_backward(oracle, step, world_size)
        _require_close_gradients(ours, oracle)
        ours.finish_gradient_synchronization()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        _require_close_values(ours, oracle)
        assert not _present(ours)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "world_size", [1, 2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4))]
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", ["frozen", "shapes", "language", "transformer"])
def test_training_equals_one_process(
    rank_pool: Pools, model: str, optimizer: str, world_size: int
) -> None:
    rank_pool(world_size).run(_train, model, optimizer)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("model", OWN_MODELS)
def test_every_model_trains_on_three_ranks_as_in_one_process(rank_pool: Pools, model: str) -> None:
    rank_pool(3).run(_train, model, "sgd")


def _accumulate(rank: int, world_size: int, model: str, way: str) -> None:
    ours, oracle = _make_pair(rank, model)
    optimizers = [OPTIMIZERS["sgd"](m.parameters()) for m in (ours, oracle)]
    for step in range(0, 6, 2):
        if way == "in_turn":
            for micro in (step, step + 1):
                loss_of(ours(data(micro, rank), rank)).backward()
        else:
            losses = [loss_of(ours(data(micro, rank), rank)) for micro in (step, step + 1)]
            if way == "together":
                torch.stack(losses).sum().backward()
            else:
                for loss in losses:
                    loss.backward()
        for micro in (step, step + 1):
            _oracle_backward(oracle, micro, world_size)
        _require_close(ours, oracle)
        assert not _present(ours)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    _require_close(ours, oracle)


@pytest.mark.parametrize("way", ["in_turn", "forward_first", "together"])
@pytest.mark.parametrize("model", ["layered", "nested", "bias_by_rank"])
def test_several_backward_passes_accumulate(rank_pool: Pools, model: str, way: str) -> None:
    rank_pool(3).run(_accumulate, model, way)


_WIDE = torch.float32 if devices.is_accelerator() else None
"""The dtype to ask for where sums must be exact: CPU ranks sum in the parameters' in any case."""


def _low_precision(rank: int, world_size: int, model: str, dtype: torch.dtype) -> None:
    """Compares with an oracle that computes in `dtype`, but averages and steps in float32."""
    ours, oracle = _make_pair(rank, model, compute_dtype=dtype, reduce_dtype=_WIDE)
    exact = copy.deepcopy(oracle)
    optimizers = [OPTIMIZERS["sgd"](m.parameters()) for m in (ours, oracle)]
    for step in range(3):
        output = ours(data(step, rank), rank)
        assert output.dtype == dtype
        loss_of(output).backward()
        for other in range(world_size):
            narrow = copy.deepcopy(oracle).to(dtype)
            narrow.zero_grad()
            loss_of(narrow(data(step, other).to(dtype), other)).backward()
            for wide, own in zip(oracle.parameters(), narrow.parameters(), strict=True):
                if own.grad is not None:
                    share = own.grad.to(wide.dtype) / world_size
                    wide.grad = share if wide.grad is None else wide.grad + share
        # The same operations on the same numbers: only the order of sums over ranks may differ.
        _require_close(ours, oracle)
        if step == 0:
            for other in range(world_size):
                rounded = data(step, other).to(dtype).float()
                (loss_of(exact(rounded, other)) / world_size).backward()
            for own, reference in zip(oracle.parameters(), exact.parameters(), strict=True):
                # Half a dozen operations, each with an error of half a unit in the last place.
                if reference.grad is not None:
                    error = (own.grad - reference.grad).norm() / reference.grad.norm()
                    assert error < 6 * torch.finfo(dtype).eps
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    _require_close(ours, oracle)


@pytest.mark.parametrize("world_size", [3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model", ["layered", "language", "tied", "frozen"])
def test_computing_in_sixteen_bits_keeps_masters(
    rank_pool: Pools, model: str, dtype: torch.dtype, world_size: int
) -> None:
    rank_pool(world_size).run(_low_precision, model, dtype)


class _Given(nn.Module):
    """A parameter whose gradient is its input."""

    def __init__(self, shape: tuple[int, ...] = (8,)) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def _sum_wide(rank: int, _world_size: int, numbers: list[float], dtype: torch.dtype) -> float:
    container = FullyShardedDataParallel(_Given(), compute_dtype=dtype, reduce_dtype=_WIDE)
    container(torch.full((8,), numbers[rank])).backward()
    (shard,) = container.parameters()
    assert shard.grad is not None
    return float(shard.grad.to_local().sum())


def test_sums_of_sixteen_bit_gradients_lose_nothing(rank_pool: Pools) -> None:
    # bf16 cannot represent 256 + 1; float16 can represent neither 1e-7 / 4 nor 4 * 3e4.
    for numbers, dtype in (
        ([256.0, 1.0, 1.0, 1.0], torch.bfloat16),
        ([1.1920929e-07] * 4, torch.float16),
        ([30000.0] * 4, torch.float16),
    ):
        total = sum(rank_pool(4).run(_sum_wide, numbers, dtype))
        assert total == pytest.approx(8 * sum(numbers) / 4, rel=1e-6)


def _mean_of_the_largest(
    rank: int, _world_size: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> list[float]:
    module = _Given(shape).to(dtype)
    container = FullyShardedDataParallel(module, compute_dtype=torch.float16)
    container(torch.full(shape, 30000.0 + 16 * rank)).backward()
    (parameter,) = container.parameters()
    assert parameter.grad is not None
    assert parameter.grad.dtype == dtype
    return local_tensor(parameter.grad).flatten().tolist()


@pytest.mark.parametrize("shape", [(8,), ()], ids=["sharded", "replicated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sums_of_float16_gradients_may_exceed_what_float16_can_hold(
    rank_pool: Pools, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    # The largest float16 number is 65,504.
    for mean in rank_pool(3).run(_mean_of_the_largest, dtype, shape):
        assert set(mean) == {30016.0}


class _Observed(torch.autograd.Function):
    """Calls `look` in the forward and the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, look: Callable[[], None]) -> Tensor:
        ctx.look = look
        look()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.look()
        return gradients[0], None


class _ObservedBlock(nn.Linear):
    look: Callable[[], None]

    def forward(self, x: Tensor, carried: Tensor | None) -> tuple[Tensor, Tensor]:
        x = _Observed.apply(super().forward(x), self.look)
        return x, x if carried is None else carried


class _ObservedBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_ObservedBlock(WIDTH, WIDTH) for _ in range(7))

    def forward(self, x: Tensor) -> Tensor:
        carried = None
        for block in self.blocks:
            # A layer must not be gathered for the gradient of a tensor that it only passes on.
            x, carried = block(F.gelu(x), carried)
        return x + carried


def _look_ahead(rank: int, _world_size: int) -> None:
    ours = FullyShardedDataParallel(_ObservedBlocks())
    seen: list[list[int]] = []

    def look() -> None:
        seen.append([index for index, layer in enumerate(ours._layers) if layer in _present(ours)])

    for block in ours.module.blocks:
        block.look = look
    forwards = [[0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5], [4, 5, 6], [5, 6], [6]]
    backwards = [[4, 5, 6], [3, 4, 5], [2, 3, 4], [1, 2, 3], [0, 1, 2], [0, 1], [0]]
    for step in range(3):
        output = ours(data(step, rank))
        # In the first pass the order of the layers is unknown.
        assert seen == (forwards if step else [[index] for index in range(7)])
        assert [ours._layers.index(layer) for layer in _present(ours)] == ([6] if step else [])
        seen.clear()
        loss_of(output).backward()
        assert seen == backwards
        assert not _present(ours)
        seen.clear()
    with torch.no_grad():
        ours(data(3, rank))
    assert seen == forwards
    assert not _present(ours)


@pytest.mark.parametrize("world_size", [2, 3])
def test_two_layers_ahead_are_gathered_and_never_more(rank_pool: Pools, world_size: int) -> None:
    rank_pool(world_size).run(_look_ahead)


def _python_tensor_bytes() -> int:
    gc.collect()
    tensors = [
        thing
        for thing in gc.get_objects()
        # The memory of a DTensor is that of its local part.
        if isinstance(thing, Tensor) and not isinstance(thing, DTensor)
    ]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _require_tensor_bytes(expected: int) -> None:
    """Requires the bytes within a second: gloo's threads may free a message after its wait."""
    for _ in range(10):
        if _python_tensor_bytes() == expected:
            return
        time.sleep(0.1)
    assert _python_tensor_bytes() == expected, _python_tensor_bytes()


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    storages = {t.untyped_storage()._cdata: t for t in (tensor.to_local() for tensor in tensors)}
    return sum(t.untyped_storage().nbytes() for t in storages.values())


def _memory(rank: int, world_size: int) -> None:
    # A mesh has its own tensors, and keeps more of them once it is used.
    mesh = init_device_mesh(devices.own_device().type, (world_size,))
    first = FullyShardedDataParallel(Blocks(), process_group=mesh)
    loss_of(first(data(0, rank), rank)).backward()
    torch.optim.SGD(first.parameters(), lr=0.1).step()
    del first
    before = _python_tensor_bytes()
    ours = FullyShardedDataParallel(Blocks(), process_group=mesh)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    shard_bytes = _storage_bytes(ours.parameters())
    _full_parameters(ours)
    # Rows are padded to those of the rank with the most, and then to 16 bytes.
    rows = -(-WIDTH // world_size)
    shard_length = -(-rows * WIDTH // 4) * 4 + -(-rows // 4) * 4
    assert shard_bytes == 7 * 4 * shard_length
    _require_tensor_bytes(before + shard_bytes)
    for step in range(2):
        loss_of(ours(data(step, rank), rank)).backward()
        gradient_bytes = _storage_bytes(p.grad for p in ours.parameters())
        assert gradient_bytes == shard_bytes + 7 * 16  # One number per parameter.
        _require_tensor_bytes(before + shard_bytes + gradient_bytes)
        optimizer.step()
        optimizer.zero_grad()
        _require_tensor_bytes(before + shard_bytes)


@pytest.mark.parametrize("world_size", [1, 3])
def test_between_steps_there_are_shards_alone(rank_pool: Pools, world_size: int) -> None:
    rank_pool(world_size).run(_memory)


def _gather(rank: int, _world_size: int, model: str) -> None:
    ours, oracle = _make_pair(rank, model, compute_dtype=torch.bfloat16)
    gathered = _full_parameters(ours)
    assert list(gathered) == [name for name, _ in oracle.named_parameters()]
    for name, expected in oracle.named_parameters():
        full = gathered[name]
        assert torch.equal(full, expected)
        assert full.dtype == expected.dtype
        assert full.untyped_storage().nbytes() == expected.nbytes
        if expected.is_contiguous(memory_format=torch.channels_last):
            assert full.is_contiguous(memory_format=torch.channels_last)
    incompatible = oracle.load_state_dict(gathered, strict=False)
    assert not incompatible.unexpected_keys
    names = [name for name, _ in ours.named_parameters()]
    assert names == list(gathered)
    assert not _present(ours)


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", ["shapes", "tied", "transformer"])
def test_full_parameters_are_gathered_with_names_shapes_and_strides(
    rank_pool: Pools, model: str, world_size: int
) -> None:
    rank_pool(world_size).run(_gather, model)


class _Skipping(Blocks):
    """Skips the layers in `skipped`."""

    skipped: tuple[int, ...] = ()

    def forward(self, x: Tensor, _rank: int) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index not in self.skipped:
                x = F.gelu(block(x))
        return x


def _change_course(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    oracle = _Skipping()
    ours = FullyShardedDataParallel(copy.deepcopy(oracle))
    optimizers = [OPTIMIZERS["sgd"](m.parameters()) for m in (ours, oracle)]
    for step, skipped in enumerate([(), (2, 3), (2, 3), (0, 6), (), (5,)]):
        ours.module.skipped = oracle.skipped = skipped
        loss_of(ours(data(step, rank), rank)).backward()
        _oracle_backward(oracle, step, world_size)
        _require_close(ours, oracle)
        assert not _present(ours)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_passes_may_run_other_layers_than_those_before(rank_pool: Pools) -> None:
    rank_pool(3).run(_change_course)


def _evaluate(rank: int, world_size: int, model: str) -> None:
    ours, oracle = _make_pair(rank, model)
    for step in range(2):
        with torch.no_grad():
            torch.testing.assert_close(
                ours(data(step, rank), rank), oracle(data(step, rank), rank), atol=1e-6, rtol=1e-6
            )
        assert not _present(ours)
        with torch.inference_mode():
            ours(data(step, rank), rank)
        assert not _present(ours)
        ours.eval()
        output = ours(data(step, rank), rank)
        assert not _present(ours)
        loss_of(output).backward()
        ours.train()
        _oracle_backward(oracle, step, world_size)
        loss_of(ours(data(step, rank), rank))  # A training pass whose loss is not used.
        loss_of(ours(data(step + 9, rank), rank)).backward()
        _oracle_backward(oracle, step + 9, world_size)
        _require_close(ours, oracle)
        with torch.no_grad():
            for shard, full in zip(ours.parameters(), oracle.parameters(), strict=True):
                shard.mul_(0.5)
                full.mul_(0.5)


@pytest.mark.parametrize("model", ["layered", "transformer", "nested"])
def test_evaluation_frees_everything(rank_pool: Pools, model: str) -> None:
    rank_pool(2).run(_evaluate, model)


def _input_gradients(rank: int, _world_size: int) -> None:
    ours, oracle = _make_pair(rank, "layered")
    inputs = [data(0, rank).requires_grad_() for _ in range(2)]
    gradients = [
        torch.autograd.grad(loss_of(model(x, rank)), x)[0]
        for model, x in zip((ours, oracle), inputs, strict=True)
    ]
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-6)
    assert all(shard.grad is None for shard in ours.parameters())
    assert not _present(ours)


def test_gradients_of_the_input_alone_leave_parameters_without(rank_pool: Pools) -> None:
    rank_pool(2).run(_input_gradients)


def _unfreeze(rank: int, world_size: int) -> None:
    ours, oracle = _make_pair(rank, "frozen")
    optimizers = [OPTIMIZERS["sgd"](m.parameters()) for m in (ours, oracle)]
    for step in range(6):
        for model in (ours.module, oracle):
            model.second.weight.requires_grad_(step in (2, 3))
        loss_of(ours(data(step, rank), rank)).backward()
        _oracle_backward(oracle, step, world_size)
        _require_close(ours, oracle)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_parameters_may_be_frozen_and_unfrozen(rank_pool: Pools) -> None:
    rank_pool(2).run(_unfreeze)


def _groups(rank: int, _world_size: int, as_mesh: bool) -> None:
    if as_mesh:
        kind = devices.own_device().type
        group = init_device_mesh(kind, (2, 2), mesh_dim_names=("outer", "inner"))["inner"]
    else:
        group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    torch.manual_seed(rank)
    ours = FullyShardedDataParallel(Layered(), process_group=group)
    torch.manual_seed(rank // 2 * 2)
    oracle = Layered()
    for other in (rank // 2 * 2, rank // 2 * 2 + 1):
        (loss_of(oracle(data(0, other), other)) / 2).backward()
    loss_of(ours(data(0, rank), rank)).backward()
    _require_close(ours, oracle)


@pytest.mark.parametrize("as_mesh", [False, True])
def test_groups_share_among_themselves(rank_pool: Pools, as_mesh: bool) -> None:
    rank_pool(4).run(_groups, as_mesh)


def _buffers(rank: int, _world_size: int) -> float:
    module = nn.BatchNorm1d(WIDTH)
    module.running_mean.fill_(rank + 5)
    return float(FullyShardedDataParallel(module).module.running_mean[0])


def test_buffers_begin_as_the_first_ranks(rank_pool: Pools) -> None:
    assert rank_pool(2).run(_buffers) == [5.0, 5.0]


class _ReturnsParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, x: Tensor) -> Any:
        return self.weight[:2]


class _ReturnsObject(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return iter([super().forward(x)])


def _refused_when_made() -> Iterator[tuple[nn.Module, str]]:
    yield nn.LazyLinear(2), "'weight' has no shape yet"
    yield nn.GELU(), "no parameters"
    yield nn.Linear(2, 2, dtype=torch.complex64), "'weight' is torch.complex64"
    counts = nn.Linear(2, 2)
    counts.steps = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    yield counts, "'steps' is torch.int64"
    compiled = Layered()
    compiled.second.compile()
    yield compiled, "'second' is compiled"
    yield torch.compile(Layered()), "is compiled"


def _refuse(rank: int, _world_size: int) -> None:
    for module, message in _refused_when_made():
        with pytest.raises(Exception, match=message):
            FullyShardedDataParallel(module)
    with pytest.raises(Exception, match="must be a floating-point dtype"):
        FullyShardedDataParallel(nn.Linear(2, 2), compute_dtype=torch.int32)
    for module, message in (
        (nn.Sequential(_ReturnsParameter()), "layer '0' returns a view of its own parameters"),
        (nn.Sequential(_ReturnsObject(WIDTH, 2)), "layer '0' returns a list_iterator"),
    ):
        with pytest.raises(Exception, match=message):
            FullyShardedDataParallel(module)(data(0, rank))
    ours = FullyShardedDataParallel(nn.Embedding(10, 4, sparse=True))
    with pytest.raises(Exception, match=r"'weight' has a torch\.sparse_coo gradient"):
        ours(torch.tensor([rank])).sum().backward()
    ours = FullyShardedDataParallel(nn.Linear(WIDTH, 2))
    with pytest.raises(Exception, match="create_graph=True cannot be averaged"):
        ours(data(0, rank)).square().sum().backward(create_graph=True)
    for refused in (copy.deepcopy, pickle.dumps):
        with pytest.raises(Exception, match="cannot be copied or pickled"):
            refused(ours)
    ours = FullyShardedDataParallel(nn.Linear(WIDTH, 2))
    ours.double()
    with pytest.raises(Exception, match=r"'(weight|bias)' was converted to torch\.float64"):
        ours(data(0, rank).double())


def test_what_cannot_be_sharded_is_refused_by_name(rank_pool: Pools) -> None:
    rank_pool(2).run(_refuse)


def _disagree(rank: int, _world_size: int) -> None:
    with pytest.raises(Exception, match="rank 1 has parameter 'weight' of shape"):
        FullyShardedDataParallel(nn.Linear(2, 2 + rank))


def test_models_that_differ_are_named_on_every_rank(rank_pool: Pools) -> None:
    rank_pool(2).run(_disagree)


def test_without_a_process_group_the_error_says_what_to_do() -> None:
    with pytest.raises(Exception, match=r"inside distributed_session\(\)"):
        FullyShardedDataParallel(nn.Linear(2, 2))


def _let_go(rank: int, _world_size: int) -> None:
    ours, _ = _make_pair(rank, "transformer")
    loss_of(ours(data(0, rank), rank)).backward()
    parameter = ours._layers[0].parameters[0]
    references = [weakref.ref(thing) for thing in (ours, parameter.full, parameter.shard)]
    del ours, parameter
    accelerator.synchronize(devices.own_device())  # Its queue may hold tensors.
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def test_a_container_that_nobody_uses_is_freed(rank_pool: Pools) -> None:
    rank_pool(2).run(_let_go)
