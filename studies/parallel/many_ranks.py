"""Measures the setup cost of one rank, in seconds and bytes, as the number of ranks grows.

    python -m studies.parallel.many_ranks --store results/scale-study.jsonl

torch's fake process group makes this process one rank of 64, 512, 4,096 and 16,384; nothing is
sent. Each container wraps a model of a billion parameters on the meta device, which has shapes but
no values; its bucket plan, shards, optimizer and checkpoint plan are built, too. The growth of each
cost is fitted as a power of the number of ranks; a cost that does not grow has a power of zero or
less. A rank's shards become smaller as ranks are added; nothing may grow. With --store, appends one
`construction` record per subject and number of ranks.
"""

import contextlib
import gc
import math
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.core import ModelShape
from paceline.core.units import MIB
from paceline.models import TransformerLM
from paceline.parallel import (
    BucketedDataParallel,
    FlatDataParallel,
    FullyShardedDataParallel,
    NaiveDataParallel,
    OverlappedDataParallel,
    ShardedDataParallel,
    ShardedOptimizer,
    ddp,
)
from paceline.parallel.buckets import plan_buckets, tensor_spec
from paceline.parallel.ranks import collectives
from paceline.parallel.ranks.collectives import (
    all_gather_single,
    reduce_scatter_single,
    start_all_gather,
    start_reduce_scatter,
)
from paceline.parallel.zero.flat_parameters import shard_evenly
from studies.harness.records import append_record, machine_case
from studies.harness.runs import fake_rank
from studies.harness.study import study_parser

WORLD_SIZES = (64, 512, 4096, 16384)
BILLION = ModelShape(vocab_size=32_000, d_model=2048, d_ff=5632, num_layers=17, num_heads=16)
_CAP_BYTES = 25 * MIB
_GROWS = 0.1
"""Powers above this are growth; smaller ones are noise."""


class AllocatedBytes(TorchDispatchMode):
    """Counts the bytes of tensors that were created inside this mode and are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._storages[StorageWeakRef(storage)] = storage.nbytes()
        return output

    def total(self) -> int:
        """Returns the bytes that are alive now."""
        gc.collect()
        return sum(size for storage, size in self._storages.items() if not storage.expired())


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Lets containers that need values accept a model on the meta device; skips broadcasts."""
    cpu = torch.device("cpu")
    with (
        mock.patch.object(ddp, "require_supported", return_value=cpu),
        mock.patch.object(ddp, "broadcast_tensors"),
    ):
        yield


def make_model(shape: ModelShape) -> nn.Module:
    """Returns a model on the meta device."""
    with torch.device("meta"):
        return TransformerLM(shape)


def _adamw(model: nn.Module) -> ShardedOptimizer:
    return ShardedOptimizer(model.parameters(), torch.optim.AdamW, foreach=True)


def _replicated(make: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], Any]:
    def build(model: nn.Module) -> Any:
        with without_values():
            return make(model)

    return build


def _with_optimizer(make: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], Any]:
    def build(model: nn.Module) -> Any:
        with without_values():
            made = make(model)
            return made, _adamw(made)

    return build


def _plans(model: nn.Module) -> Any:
    specs = [tensor_spec(parameter) for parameter in model.parameters()]
    plans = plan_buckets(specs, _CAP_BYTES)
    return [list(shard_evenly(plan, dist.get_world_size()).slices(0)) for plan in plans]


def _checkpoint_plan(model: nn.Module) -> Any:
    """Returns the checkpoint plan of a rank of a sharded container."""
    with without_values():
        sharded = ShardedDataParallel(model)
        optimizer = _adamw(sharded)
    for part in optimizer.parts:
        if part.inner is not None:
            for shard in part.shards:
                part.inner.state[shard.tensor] = {
                    "step": torch.tensor(1.0),
                    "exp_avg": torch.empty_like(shard.tensor),
                    "exp_avg_sq": torch.empty_like(shard.tensor),
                }
    planner = DefaultSavePlanner()
    planner.set_up_planner({"optimizer": optimizer.checkpoint_state(sharded)}, None, False)
    return planner.create_local_plan()


def _fully_sharded(model: nn.Module) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(model, initialize=lambda _module: None)  # Any values work.


def _fully_sharded_checkpoint_plan(model: nn.Module) -> Any:
    """Returns the checkpoint plan of a rank of a fully sharded container."""
    sharded = _fully_sharded(model)
    planner = DefaultSavePlanner()
    planner.set_up_planner(sharded.state_dict(), None, False)
    return planner.create_local_plan()


def _flat() -> Tensor:
    """Returns a small bucket; the cost of a launch does not depend on its size."""
    return torch.zeros(max(WORLD_SIZES) * 16)


def _messages(_model: nn.Module) -> Any:
    """Starts a bucket's collectives of one step, in place as on GPUs."""
    flat, world_size = _flat(), dist.get_world_size()
    borders = range(0, flat.numel() + 1, flat.numel() // world_size)
    group = dist.group.WORLD
    assert group is not None
    with mock.patch.object(collectives, "works_in_place", return_value=True):
        return start_reduce_scatter(flat, group), start_all_gather(flat, borders, group)


def _messages_of_torch(_model: nn.Module) -> Any:
    """Starts the same collectives by bare calls, to show the cost of the fake group itself."""
    flat = _flat()
    own = flat[: flat.numel() // dist.get_world_size()]
    return (
        reduce_scatter_single(own, flat, async_op=True),
        all_gather_single(flat, own, async_op=True),
    )


SUBJECTS: dict[str, Callable[[nn.Module], Any]] = {
    "bucket plan and shard layout": _plans,
    "naive": _replicated(NaiveDataParallel),
    "flat": _replicated(FlatDataParallel),
    "overlapped": _replicated(OverlappedDataParallel),
    "ddp": _replicated(BucketedDataParallel),
    "zero1": _with_optimizer(BucketedDataParallel),
    "zero2": _with_optimizer(ShardedDataParallel),
    "fsdp": _fully_sharded,
    "checkpoint plan of zero2": _checkpoint_plan,
    "checkpoint plan of fsdp": _fully_sharded_checkpoint_plan,
    "messages of a bucket": _messages,
    "messages of a bucket, bare": _messages_of_torch,
}


def measure(subject: str, shape: ModelShape, repetitions: int) -> dict[str, float | list[float]]:
    """Returns the seconds, tensor bytes and peak bytes of Python objects of one subject."""
    build = SUBJECTS[subject]
    seconds = []
    for _ in range(repetitions):
        model = make_model(shape)
        began = time.perf_counter()
        made = build(model)
        seconds.append(time.perf_counter() - began)
        del model, made
        gc.collect()
    model = make_model(shape)
    with AllocatedBytes() as allocated:
        made = build(model)
        tensor_bytes = allocated.total()
    del model, made
    gc.collect()
    model = make_model(shape)
    tracemalloc.start()
    made = build(model)
    _, python_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del model, made
    return {"time_s": seconds, "tensor_bytes": tensor_bytes, "python_bytes": python_bytes}


def power_of(world_sizes: list[int], values: list[float]) -> float:
    """Fits values as a power of the number of ranks; returns zero if any value is zero."""
    if min(values) <= 0:
        return 0.0
    x = [math.log(size) for size in world_sizes]
    return statistics.linear_regression(x, [math.log(value) for value in values]).slope


def main() -> int:
    """Measures all subjects at all sizes, and fits their growth."""
    parser = study_parser(__doc__, "--store")
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--world-sizes", nargs="+", type=int, default=list(WORLD_SIZES))
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    num_parameters = sum(p.numel() for p in make_model(BILLION).parameters())
    print(f"{num_parameters / 1e9:.2f} billion parameters")
    grows = []
    for subject in arguments.subjects:
        found: dict[str, list[float]] = {"time_s": [], "tensor_bytes": [], "python_bytes": []}
        for world_size in arguments.world_sizes:
            with fake_rank(world_size):
                numbers = measure(subject, BILLION, arguments.repetitions)
            for name, value in numbers.items():
                found[name].append(statistics.median(value) if isinstance(value, list) else value)
            if arguments.store is not None:
                case = {
                    "subject": subject,
                    "parameters": num_parameters,
                    "world_size": world_size,
                    **machine_case(),
                }
                append_record(arguments.store, "construction", case, numbers)
        powers = {name: power_of(arguments.world_sizes, values) for name, values in found.items()}
        shown = ", ".join(
            f"{name} {' '.join(f'{value:.3g}' for value in values)} (power {powers[name]:+.2f})"
            for name, values in found.items()
        )
        print(f"{subject}: {shown}", flush=True)
        grows += [f"{subject}: {name}" for name, power in powers.items() if power > _GROWS]
    print(f"grows with ranks: {', '.join(grows) or 'nothing'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
