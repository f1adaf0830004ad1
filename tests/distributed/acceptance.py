"""Acceptance checks of the containers for GPUs; at toy size they also run on other devices.

Each check runs on every rank, raises if it fails, and returns numbers to record. Parts that a
device cannot show are skipped on it: a CPU is synchronous, and the emulated accelerator has no
profiler.
"""

import contextlib
import json
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.core.ranges import is_bucket_range
from paceline.core.strategies import StrategyName
from paceline.devices import accelerator
from paceline.devices.accelerator import nth_device
from paceline.parallel import DataParallelContainer
from paceline.parallel.ranks.collectives import start_all_gather, start_reduce_scatter
from paceline.parallel.strategies import apply_strategy, make_optimizer
from paceline.traces.capture import record_ranks
from tests import devices

STRATEGIES: tuple[StrategyName, ...] = (
    *("naive", "flat", "overlapped", "ddp", "torch_ddp"),
    *("zero1", "torch_zero", "zero2"),
    *("fsdp", "torch_fsdp2"),
)
OVERLAPPING: tuple[StrategyName, ...] = ("ddp", "zero2")
CONTAINERS: tuple[StrategyName, ...] = (*("naive", "flat", "overlapped", "ddp"), *("zero2", "fsdp"))

Numbers = dict[str, float]
_STEPS = 4


class Blocks(nn.Module):
    """Layers whose weights are larger than the activations between them."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + F.gelu(block(x))
        return x


def _model(device: torch.device, width: int, num_layers: int) -> nn.Module:
    torch.manual_seed(0)
    return Blocks(width, num_layers).to(device)


def _data(step: int, rank: int, width: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn((4, width), generator=generator).to(device)


def _train(model: nn.Module, optimizer: Any, batches: Iterator[Tensor]) -> list[Tensor]:
    losses = []
    for batch in batches:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def equals_one_process(
    rank: int, world_size: int, device_type: str, strategy: StrategyName
) -> Numbers:
    """Trains and compares the mean loss of each step with that of one process on this device."""
    device, width = nth_device(device_type, rank), 32
    model = apply_strategy(strategy, _model(device, width, 6))
    optimizer = make_optimizer(strategy, model, torch.optim.AdamW, lr=1e-3)
    own = _train(model, optimizer, (_data(s, rank, width, device) for s in range(_STEPS)))
    alone = _model(device, width, 6)
    expected = _train(
        alone,
        torch.optim.AdamW(alone.parameters(), lr=1e-3),
        (
            torch.cat([_data(s, other, width, device) for other in range(world_size)])
            for s in range(_STEPS)
        ),
    )
    mean = torch.stack(own) / world_size
    dist.all_reduce(mean)
    difference = ((mean - torch.stack(expected)).abs() / torch.stack(expected)).max().item()
    assert difference < 1e-4, f"losses differ from one process by {difference:.2g}"
    return {"relative_difference": difference}


def collectives_are_right(rank: int, world_size: int, device_type: str) -> Numbers:
    """Runs reduce-scatter, all-gather and all-reduce on numbers whose sums are known."""
    device = nth_device(device_type, rank)
    group = dist.group.WORLD
    assert group is not None
    length = 1000
    message = torch.arange(world_size * length, device=device, dtype=torch.float32) + rank
    expected = (message - rank) * world_size + sum(range(world_size))
    reduced = start_reduce_scatter(message.clone(), group)
    total = torch.empty(length, device=device)
    reduced.wait()
    reduced.add_to(total, overwrite=True)
    own = slice(rank * length, (rank + 1) * length)
    torch.testing.assert_close(total, expected[own])
    flat = torch.zeros_like(message)
    flat[own] = total
    borders = range(0, world_size * length + 1, length)
    start_all_gather(flat, borders, group).wait()
    torch.testing.assert_close(flat, expected)
    dist.all_reduce(message)
    torch.testing.assert_close(message, expected)
    return {"size_bytes": message.nbytes}


def _peak_bytes(
    rank: int, device: torch.device, strategy: StrategyName, width: int, num_layers: int
) -> int:
    """Returns the allocator's peak over two steps; on a CPU, the bytes in use after them."""
    model = apply_strategy(strategy, _model(device, width, num_layers))
    optimizer = make_optimizer(strategy, model, torch.optim.AdamW, lr=1e-3)
    if device.type != "cpu":
        accelerator.reset_peak(device)
    _train(model, optimizer, (_data(step, rank, width, device) for step in range(2)))
    if device.type != "cpu":
        return accelerator.peak_allocated_bytes(device)
    return _held_bytes(model, optimizer)


def _held_bytes(model: nn.Module, optimizer: Any) -> int:
    """Returns the bytes of parameters and optimizer state, counting each storage once."""
    tensors = [getattr(p, "to_local", lambda p=p: p)().detach() for p in model.parameters()]
    if hasattr(optimizer, "state_tensors"):
        tensors += optimizer.state_tensors()
    else:
        states = [value for state in optimizer.state.values() for value in state.values()]
        tensors += [getattr(v, "to_local", lambda v=v: v)() for v in states if torch.is_tensor(v)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def memory_is_saved(rank: int, world_size: int, device_type: str, width: int) -> Numbers:
    """Compares peak bytes per parameter of ZeRO-1, 2 and 3 with those of full replicas.

    In float32 a replica takes 16 bytes per parameter plus a bucket or two. Sharding the optimizer
    state saves 8 (n - 1)/n of them; gradients and parameters save 4 (n - 1)/n more each.
    """
    device = nth_device(device_type, rank)
    num_layers = 16
    num_parameters = sum(p.numel() for p in Blocks(width, num_layers).parameters())
    peaks = {
        strategy: _peak_bytes(rank, device, strategy, width, num_layers) / num_parameters
        for strategy in ("ddp", "zero1", "zero2", "fsdp")
    }
    share = (world_size - 1) / world_size
    gradients = 4 if device.type != "cpu" else 0  # On a CPU, measured after they are freed.
    expected = {
        "zero1": 8 * share,
        "zero2": (8 + gradients) * share,
        "fsdp": (12 + gradients) * share,
    }
    for strategy, saved in expected.items():
        found = peaks["ddp"] - peaks[strategy]
        # Two buckets or layers in flight are a noticeable share of the sixteen layers.
        assert found > 0.75 * saved, (
            f"{strategy} saves {found:.1f} B per parameter, not {saved:.1f}"
        )
    return {f"{strategy}_bytes_per_parameter": value for strategy, value in peaks.items()}


def trace_shows_messages(
    rank: int, world_size: int, device_type: str, strategy: StrategyName
) -> Numbers:
    """Records a step and requires that the trace shows the messages of every rank."""
    device, width = nth_device(device_type, rank), 64
    model = apply_strategy(strategy, _model(device, width, 4), 0.02)
    optimizer = make_optimizer(strategy, model, torch.optim.SGD, lr=0.1)
    _train(model, optimizer, (_data(step, rank, width, device) for step in range(2)))
    with tempfile.TemporaryDirectory(prefix="paceline-acceptance-") as own:
        paths = [own]
        dist.broadcast_object_list(paths, 0, device=device)
        path = pathlib.Path(paths[0]) / "trace.json"
        with record_ranks(path, device):
            _train(model, optimizer, iter([_data(9, rank, width, device)]))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        dist.barrier()
    buckets = {
        (event["pid"], event["name"]) for event in events if is_bucket_range(event.get("name", ""))
    }
    by_rank = {process for process, _ in buckets}
    assert len(by_rank) == world_size, f"messages of {len(by_rank)} of {world_size} ranks"
    numbers = {"num_buckets": len(buckets) / world_size}
    if device.type == "cuda":
        kernels = [event for event in events if "nccl" in event.get("name", "").lower()]
        assert kernels, "no kernel of NCCL in the trace"
        numbers["num_nccl_events"] = len(kernels)
    return numbers


def messages_overlap(rank: int, _world_size: int, device_type: str, width: int) -> Numbers:
    """Measures the exposed wait after backward, with one message and with buckets."""
    device = nth_device(device_type, rank)
    exposed = {}
    for strategy in ("flat", "ddp"):
        size_mb = [width * width * 8 / 2**20] if strategy == "ddp" else []
        model = apply_strategy(strategy, _model(device, width, 12), *size_mb)
        assert isinstance(model, DataParallelContainer)
        model.record_statistics()
        optimizer = make_optimizer(strategy, model, torch.optim.SGD, lr=0.1)
        waits = []
        for step in range(6):
            _train(model, optimizer, iter([_data(step, rank, width, device)]))
            stats = model.synchronization_stats()
            assert stats is not None
            assert all(bucket.finish_s >= bucket.launch_s >= 0 for bucket in stats.buckets)
            waits.append(stats.exposed_wait_s)
        exposed[strategy] = sorted(waits[1:])[2]
    if device.type == "cuda":
        assert exposed["ddp"] < exposed["flat"], f"nothing is hidden: {exposed}"
    return {f"{strategy}_exposed_s": seconds for strategy, seconds in exposed.items()}


def host_is_never_awaited(
    rank: int, _world_size: int, device_type: str, strategy: StrategyName
) -> Numbers:
    """Trains while waits of the host in forward and backward are errors, if the device can tell."""
    device, width = nth_device(device_type, rank), 32
    model = apply_strategy(strategy, _model(device, width, 6))
    optimizer = make_optimizer(strategy, model, torch.optim.AdamW, lr=1e-3, foreach=True)
    _train(model, optimizer, (_data(step, rank, width, device) for step in range(3)))
    batches = [_data(step, rank, width, device) for step in range(3, 6)]
    for batch in batches:
        with _no_host_synchronization(device):
            model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"num_passes": len(batches)}


@contextlib.contextmanager
def _no_host_synchronization(device: torch.device) -> Iterator[None]:
    if device.type == "emulated":
        with devices.emulated().forbidden_synchronizations():
            yield
        return
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


Check = tuple[Callable[..., Numbers], tuple[Any, ...]]


def checks(device_type: str) -> dict[str, Check]:
    """Returns all checks by name: the function, and its arguments after the device type."""
    # On an accelerator, several buckets of the default size: one in flight is a part of all.
    width = {"cpu": 64, "emulated": 1024}.get(device_type, 2048)
    found: dict[str, Check] = {"collectives": (collectives_are_right, ())}
    found |= {f"training {name}": (equals_one_process, (name,)) for name in STRATEGIES}
    found["memory"] = (memory_is_saved, (width,))
    found |= {f"trace {name}": (trace_shows_messages, (name,)) for name in OVERLAPPING}
    found["overlap"] = (messages_overlap, (width,))
    found |= {f"no host waits {name}": (host_is_never_awaited, (name,)) for name in CONTAINERS}
    return found
