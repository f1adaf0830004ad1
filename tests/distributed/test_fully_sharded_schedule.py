"""When the fully sharded container sends, waits and frees, and which errors break its order."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.parallel import RankPool
from paceline.parallel.fsdp import layer as layer_module
from paceline.parallel.fsdp.container import FullyShardedDataParallel
from paceline.parallel.fsdp.layers import WrapPolicy
from paceline.parallel.ranks.pending import Pending
from tests.distributed.device_pool import DevicePool
from tests.distributed.toys import WIDTH, data, loss_of

Pools = Callable[[int], RankPool]


class Blocks(nn.Module):
    def __init__(self, num_blocks: int = 4, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(num_blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _blocks() -> Blocks:
    torch.manual_seed(0)
    return Blocks()


def _require_same_gradients(ours: nn.Module, oracle: nn.Module) -> None:
    for (name, own), expected in zip(ours.named_parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(
            own.grad.full_tensor(),
            expected.grad,
            atol=1e-6,
            rtol=1e-6,
            msg=lambda m, n=name: f"{n}: {m}",
        )


class _Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, breaks: bool) -> Tensor:
        ctx.breaks = breaks
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        if ctx.breaks:
            raise ZeroDivisionError
        return gradients[0], None


def _break_off(rank: int, _world_size: int, where: str) -> str:
    ours = FullyShardedDataParallel(_blocks())
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)

    def hook(_module: nn.Module, _arguments: Any, output: Tensor) -> Tensor:
        is_broken = rank == 0 and step == 1
        if is_broken and where == "forward":
            raise ZeroDivisionError
        return _Breaks.apply(output, is_broken)

    ours.module.blocks[1].register_forward_hook(hook)
    begun = time.monotonic()
    for step in range(4):
        try:
            loss_of(ours(data(step, rank))).backward()
        except ZeroDivisionError:
            continue  # Like a loop that skips a batch.
        except Exception as error:
            assert time.monotonic() - begun < 30
            return f"{type(error).__name__}: {error}"
        optimizer.step()
        optimizer.zero_grad()
    return "went on"


@pytest.mark.host("NCCL ends a rank whose messages do not come")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_a_broken_pass_every_rank_that_goes_on_says_so(where: str) -> None:
    with DevicePool(2, timeout_s=5, run_timeout_s=60) as pool:
        first, second = pool.run(_break_off, where)
    assert first.startswith("SynchronizationError: rank 0: the last " + where)
    assert "restart from a checkpoint" in first
    assert second.startswith("CollectiveError")


def _alone(_rank: int, _world_size: int) -> None:
    ours = FullyShardedDataParallel(_blocks())
    with pytest.raises(RuntimeError):
        ours(torch.ones(2, WIDTH + 1))
    handle = ours.module.blocks[1].register_forward_hook(
        lambda _module, _arguments, output: _Breaks.apply(output, True)
    )
    with pytest.raises(ZeroDivisionError):
        loss_of(ours(data(0, 0))).backward()
    handle.remove()
    oracle = _blocks()
    for model in (ours, oracle):
        loss_of(model(data(1, 0))).backward()
    _require_same_gradients(ours, oracle)


def test_one_rank_alone_goes_on_after_an_error(rank_pool: Pools) -> None:
    rank_pool(1).run(_alone)


def _penalty(model: nn.Module, x: Tensor, *, alone: bool) -> Tensor:
    x = x.clone().requires_grad_()
    y = model(x).sum(-1)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    penalty = ((gradient.norm(dim=-1) - 1) ** 2).mean()
    return penalty if alone else penalty + y.mean()


def _gradient_penalty(rank: int, world_size: int, alone: bool) -> None:
    ours, oracle = FullyShardedDataParallel(_blocks()), _blocks()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, oracle)]
    for step in range(3):
        # Another forward pass runs between the two backward passes of the penalty.
        loss = _penalty(ours, data(step, rank), alone=alone) + loss_of(ours(data(step + 9, rank)))
        loss.backward()
        for other in range(world_size):
            loss = _penalty(oracle, data(step, other), alone=alone)
            loss = loss + loss_of(oracle(data(step + 9, other)))
            (loss / world_size).backward()
        _require_same_gradients(ours, oracle)
        assert not any(layer.num_present_bytes for layer in ours._layers)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("alone", [False, True])
def test_a_gradient_penalty_is_that_of_one_process(rank_pool: Pools, alone: bool) -> None:
    rank_pool(2).run(_gradient_penalty, alone)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0])


def _attention(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    oracle = _Attention()
    torch.manual_seed(0)
    ours = FullyShardedDataParallel(_Attention())
    inputs = [torch.randn(2, 3, 8) for _ in range(world_size)]
    ours(inputs[rank]).square().mean().backward()
    for x in inputs:
        (oracle(x).square().mean() / world_size).backward()
    _require_same_gradients(ours, oracle)
    ours.eval()
    oracle.eval()
    with torch.no_grad():
        torch.testing.assert_close(ours(inputs[0]), oracle(inputs[0]), atol=1e-6, rtol=1e-6)


def test_attention_outside_of_a_list_is_one_layer(rank_pool: Pools) -> None:
    rank_pool(2).run(_attention)


class _Aliased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.all_weights = [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.all_weights[0]


class _ReadsAnother(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.inner.weight


def _refuse(rank: int, _world_size: int) -> None:
    with pytest.raises(Exception, match=r"'_Aliased' keeps parameter 'weight' in 'all_weights'"):
        FullyShardedDataParallel(_Aliased())
    ours = FullyShardedDataParallel(nn.Sequential(nn.Identity(), _ReadsAnother()))
    with pytest.raises(Exception, match=r"module '1' reads parameters of another.*WrapPolicy"):
        ours(data(0, rank))
    whole = FullyShardedDataParallel(_ReadsAnother(), wrap=WrapPolicy(classes=(_ReadsAnother,)))
    whole(data(0, rank)).sum().backward()
    with pytest.raises(Exception, match=r"has none of \['Conv2d'\]"):
        FullyShardedDataParallel(_blocks(), wrap=WrapPolicy(classes=(nn.Conv2d,)))
    ours = FullyShardedDataParallel(_blocks())
    ours.module.blocks[0][0].bias = nn.Parameter(torch.zeros(WIDTH))
    with pytest.raises(Exception, match=r"'blocks\.0\.0\.bias' was replaced"):
        ours(data(0, rank))


def test_parameters_that_are_kept_or_read_elsewhere_are_refused_by_name(rank_pool: Pools) -> None:
    rank_pool(2).run(_refuse)


def _compile(rank: int, world_size: int, how: str) -> None:
    ours, oracle = FullyShardedDataParallel(_blocks()), _blocks()
    call: Any = ours
    if how == "container":
        call = torch.compile(ours, backend="aot_eager")
    elif how == "module":
        ours.module.compile(backend="aot_eager")
    else:
        for block in ours.module.blocks:
            block.compile(backend="aot_eager")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (ours, oracle)]
    for step in range(3):
        loss_of(call(data(step, rank))).backward()
        for other in range(world_size):
            (loss_of(oracle(data(step, other))) / world_size).backward()
        _require_same_gradients(ours, oracle)
        assert not any(layer.num_present_bytes for layer in ours._layers)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", ["blocks", "module", "container"])
def test_compiled_layers_train_as_in_one_process(rank_pool: Pools, how: str) -> None:
    rank_pool(2).run(_compile, how)


def _pile_up(_rank: int, _world_size: int) -> int:
    """Returns the maximum number of live messages if none ever reports completion."""
    num_alive = most = 0
    kind = layer_module.GradientMessage
    new, receive, completed = kind._new, kind.receive, Pending.is_completed

    def opening(message: Any, dtype: torch.dtype) -> Tensor:
        nonlocal num_alive, most
        num_alive += 1
        most = max(most, num_alive)
        return new(message, dtype)

    def receiving(message: Any) -> None:
        nonlocal num_alive
        num_alive -= len(message._in_flight)
        receive(message)

    kind._new, kind.receive = opening, receiving  # type: ignore[method-assign]
    Pending.is_completed = lambda _self: False  # type: ignore[method-assign]
    try:
        ours = FullyShardedDataParallel(Blocks(24, 64))
        for _ in range(2):
            loss_of(ours(torch.randn(2, 64))).backward()
    finally:
        kind._new, kind.receive = new, receive  # type: ignore[method-assign]
        Pending.is_completed = completed  # type: ignore[method-assign]
    assert num_alive == 0
    return most


def test_at_most_two_messages_of_gradients_are_alive(rank_pool: Pools) -> None:
    assert rank_pool(2).run(_pile_up) == [2, 2]


_READS_THE_DEVICE = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")


class _NoHostReads(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in _READS_THE_DEVICE, func
        return func(*args, **(kwargs or {}))


def _reads(rank: int, _world_size: int) -> None:
    ours = FullyShardedDataParallel(_blocks())
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    inputs = [data(step, rank) for step in range(4)]
    loss_of(ours(inputs[0])).backward()
    with _NoHostReads():
        with ours.no_sync():
            loss_of(ours(inputs[1])).backward()
        ours.set_gradient_weight(1.0 + rank)
        loss_of(ours(inputs[2])).backward()
        ours.clip_grad_norm_(1.0)
        optimizer.step()
    with pytest.raises(AssertionError, match="_local_scalar_dense"), _NoHostReads():
        torch.ones(1).item()


def test_nothing_is_read_from_the_device_between_forward_and_step(rank_pool: Pools) -> None:
    rank_pool(2).run(_reads)


class _DetachedByRank(Blocks):
    """Ends the backward pass of rank 1 halfway."""

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x)
            if dist.get_rank() == 1 and index == 1:
                x = x.detach()
        return x


def _launches(rank: int, _world_size: int) -> list[str]:
    torch.manual_seed(0)
    ours = FullyShardedDataParallel(_DetachedByRank())
    launches: list[str] = []
    gather, send = layer_module._gather, layer_module.GradientMessage.send

    def gathering(flat: Tensor, *arguments: Any) -> Any:
        number = next(n for n, layer in enumerate(ours._layers) if layer.flat is flat)
        launches.append(f"gather {number}")
        return gather(flat, *arguments)

    def sending(message: Any, *arguments: Any, **keywords: Any) -> None:
        number = next(n for n, layer in enumerate(ours._layers) if layer.gradients is message)
        launches.append(f"send {number}")
        send(message, *arguments, **keywords)

    layer_module._gather = gathering
    layer_module.GradientMessage.send = sending  # type: ignore[method-assign]
    try:
        for step in range(2):
            launches.clear()
            loss_of(ours(data(step, rank))).backward()
    finally:
        layer_module._gather = gather
        layer_module.GradientMessage.send = send  # type: ignore[method-assign]
    return launches


def test_all_ranks_launch_in_the_same_order(rank_pool: Pools) -> None:
    orders = rank_pool(3).run(_launches)
    assert orders[0] == orders[1] == orders[2]
    assert [one for one in orders[0] if "send" in one] == [f"send {n}" for n in (3, 2, 1, 0)]
    assert orders[0][:4] == [f"gather {n}" for n in range(4)]
