"""Programs of torch's own parallelism: none may be flagged, for none has a race."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from paceline.parallel import RankPool
from tests import devices

_WIDTH, _STEPS = 32, 3
Parameters = Iterable[nn.Parameter]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 2 * _WIDTH)
        self.down = nn.Linear(2 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return x


OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "AdamW foreach": lambda own: torch.optim.AdamW(own, lr=1e-3, foreach=True),
    "AdamW fused": lambda own: torch.optim.AdamW(own, lr=1e-3, fused=True),
    "SGD momentum": lambda own: torch.optim.SGD(own, lr=1e-3, momentum=0.9, foreach=True),
    "Adafactor": lambda own: torch.optim.Adafactor(own, lr=1e-3),
    "Muon": lambda own: torch.optim.Muon([each for each in own if each.dim() == 2], lr=1e-3),
}


def _sharded(*, checkpoints: bool = False, **keywords: Any) -> nn.Module:
    model = Model(checkpoints=checkpoints).to(devices.device_of(dist.get_rank()))
    for layer in model.layers:
        fully_shard(layer, **keywords)
    return fully_shard(model, **keywords)


def _replicated(*, checkpoints: bool = False, **keywords: Any) -> nn.Module:
    model = Model(checkpoints=checkpoints).to(devices.device_of(dist.get_rank()))
    # Small buckets, so that messages overlap backward.
    return DistributedDataParallel(model, bucket_cap_mb=0.01, **keywords)


def _batch(step: int) -> Tensor:
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(8, _WIDTH, generator=generator).to(devices.device_of(rank))


@contextlib.contextmanager
def _without_messages(model: nn.Module, *, is_last: bool) -> Iterator[None]:
    if isinstance(model, DistributedDataParallel):
        with contextlib.nullcontext() if is_last else model.no_sync():
            yield
        return
    model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
    yield


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    passes: int = 1,
    precision: torch.dtype | None = None,
) -> None:
    for step in range(_STEPS):
        parts = _batch(step).chunk(passes)
        for number, part in enumerate(parts, start=1):
            with _without_messages(model, is_last=number == passes):
                with torch.autocast("emulated", dtype=precision, enabled=precision is not None):
                    loss = model(part).float().square().mean() / passes
                loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return OPTIMIZERS["AdamW foreach"](model.parameters())


def _accumulate(make: Callable[[], nn.Module]) -> None:
    model = make()
    _train(model, _adamw(model), passes=2)


def _checkpoint_activations(make: Callable[..., nn.Module]) -> None:
    model = make(checkpoints=True)
    _train(model, _adamw(model))


def _autocast(make: Callable[[], nn.Module]) -> None:
    model = make()
    _train(model, _adamw(model), precision=torch.bfloat16)


def _lower_parameters() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = _sharded(mp_policy=policy)
    _train(model, _adamw(model))


def _static_graph() -> None:
    model = _replicated(static_graph=True, gradient_as_bucket_view=True)
    _train(model, _adamw(model))


def _compressed() -> None:
    model = _replicated()
    assert isinstance(model, DistributedDataParallel)
    model.register_comm_hook(None, fp16_compress_hook)
    _train(model, _adamw(model))


def _zero(overlapping: bool) -> None:
    model = _replicated()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        parameters_as_bucket_view=overlapping,
        lr=1e-3,
        foreach=True,
    )
    _train(model, optimizer)


def _join() -> None:
    model = _replicated()
    optimizer = _adamw(model)
    assert isinstance(model, DistributedDataParallel)
    with Join([model]):
        for step in range(2 + dist.get_rank()):  # Rank 1 has one batch more.
            model(_batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


PROGRAMS: dict[str, Callable[[], None]] = {
    "DDP accumulates": lambda: _accumulate(_replicated),
    "FSDP2 accumulates": lambda: _accumulate(_sharded),
    "DDP checkpoints activations": lambda: _checkpoint_activations(_replicated),
    "FSDP2 checkpoints activations": lambda: _checkpoint_activations(_sharded),
    "DDP autocast": lambda: _autocast(_replicated),
    "FSDP2 autocast": lambda: _autocast(_sharded),
    "FSDP2 bf16 parameters": _lower_parameters,
    "DDP static graph": _static_graph,
    "DDP float16 messages": _compressed,
    "ZeRO": lambda: _zero(overlapping=False),
    "ZeRO bucket views": lambda: _zero(overlapping=True),
    "DDP join": _join,
}
for _name, _optimizer in OPTIMIZERS.items():
    PROGRAMS[f"DDP {_name}"] = lambda make=_optimizer: _with(_replicated, make)
    if _name != "Adafactor":  # Cannot update what is sharded, on any device.
        PROGRAMS[f"FSDP2 {_name}"] = lambda make=_optimizer: _with(_sharded, make)


def _with(make: Callable[[], nn.Module], optimizer: Callable[[Parameters], Any]) -> None:
    model = make()
    _train(model, optimizer(model.parameters()))


def _run(_rank: int, _world_size: int, name: str, seed: int | None) -> list[str]:
    torch.manual_seed(0)
    device_module = devices.emulated()
    device_module.clear()
    with contextlib.nullcontext() if seed is None else device_module.delays(seed):
        PROGRAMS[name]()
        torch.accelerator.synchronize()
    return list(device_module.hazards())


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(2, backend=devices.backend(), timeout_s=120) as pool:
        yield pool


@pytest.mark.parametrize("name", PROGRAMS)
def test_torch_is_not_flagged(ranks: RankPool, name: str) -> None:
    assert ranks.run(_run, name, None) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", PROGRAMS)
def test_torch_is_not_flagged_when_streams_are_delayed(
    ranks: RankPool, name: str, seed: int
) -> None:
    assert ranks.run(_run, name, seed) == [[], []]
