"""Registry of data-parallel strategies, including torch's own.

Benchmarks and the trainer select a strategy by name, so all of them are compared under the same
conditions.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

# Import before a group exists: a group that exists at import becomes a default argument there.
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from paceline.core.errors import UsageError
from paceline.core.strategies import (
    BUCKET_STRATEGIES,
    BucketSize,
    Compression,
    StrategyName,
    find_strategy,
    require_compression,
)
from paceline.parallel.contract import DataParallelContainer, persistent_buffers
from paceline.parallel.ddp import (
    BucketedDataParallel,
    FlatDataParallel,
    NaiveDataParallel,
    OverlappedDataParallel,
)
from paceline.parallel.dtensor import whole_tensor
from paceline.parallel.fsdp.container import FullyShardedDataParallel
from paceline.parallel.torch_fsdp2 import apply_fsdp2, traffic_of
from paceline.parallel.traffic import SynchronizationStats
from paceline.parallel.zero.container import ShardedDataParallel
from paceline.parallel.zero.optimizer import ShardedOptimizer

# torch 2.13 renames this option and deprecates the old name; earlier versions have only the old.
_SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)

_SHARD_THE_OPTIMIZER: tuple[StrategyName, ...] = ("zero1", "zero2")


def apply_strategy(
    name: StrategyName,
    module: nn.Module,
    bucket_size_mb: BucketSize | None = None,
    compression: Compression = "none",
    *,
    group: dist.ProcessGroup | None = None,
) -> nn.Module:
    """Wraps a module for data-parallel training over a group; "none" returns it unchanged.

    The group is by default all ranks. Without a bucket size, each strategy uses its own default.
    """
    name = find_strategy(name)
    require_compression(name, compression)
    options: dict[str, Any] = {}
    if group is not None and name != "none":
        options["process_group"] = group
    if bucket_size_mb is not None:
        if name not in BUCKET_STRATEGIES:
            raise UsageError(f"strategy {name!r} has no buckets, so no bucket size applies to it")
        options["bucket_size_mb"] = bucket_size_mb
    if compression == "bf16" and name != "torch_ddp":
        options["reduction_dtype"] = torch.bfloat16
    elif compression != "none":
        options["compression"] = compression
    return _WRAP[name](module, **options)


def make_optimizer(
    name: StrategyName,
    model: nn.Module,
    optimizer_cls: type[Optimizer],
    *,
    groups: Sequence[dict[str, Any]] | None = None,
    process_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> Optimizer:
    """Creates the optimizer of a model that a strategy has wrapped.

    Args:
        name: The strategy.
        model: The wrapped model.
        optimizer_cls: A torch optimizer class.
        groups: Parameter groups; by default one group with all of the model's parameters.
        process_group: The ranks over which the strategy has wrapped the model; by default all.
        options: Keyword arguments for the optimizer.
    """
    name = find_strategy(name)
    parameters = list(model.parameters()) if groups is None else list(groups)
    if name == "torch_zero" and dist.get_world_size(process_group) > 1:
        # This import compiles torch's functional optimizers: a sixth of a rank's import time.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(
            parameters,
            optimizer_cls,
            process_group=process_group,
            # Its fastest setting: one broadcast per rank instead of one per parameter.
            parameters_as_bucket_view=True,
            **options,
        )
    if name in _SHARD_THE_OPTIMIZER:
        return ShardedOptimizer(parameters, optimizer_cls, process_group=process_group, **options)
    return optimizer_cls(parameters, **options)


def clip_grad_norm(model: nn.Module, max_norm: float) -> Tensor:
    """Clips the gradients, sharded or not, to a total norm; returns the norm before clipping."""
    if isinstance(model, DataParallelContainer):
        return model.clip_grad_norm_(max_norm)
    return whole_tensor(nn.utils.clip_grad_norm_(model.parameters(), max_norm))


@contextlib.contextmanager
def without_synchronization(model: nn.Module) -> Iterator[None]:
    """Accumulates gradients locally inside the context; a later pass averages them."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    elif isinstance(model, DataParallelContainer | DistributedDataParallel):
        with model.no_sync():
            yield
    else:
        yield


def message_sizes(module: nn.Module) -> list[int]:
    """Returns the bytes of each gradient message in the last step of a wrapped module."""
    if isinstance(module, DataParallelContainer):
        return module.message_bytes()
    if isinstance(module, DistributedDataParallel):
        data = module._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        # DDP rebuilds its buckets after the first step; until then only the initial sizes exist.
        text = data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]
        return [int(size) for size in text.split(",")]
    return [] if (traffic := traffic_of(module)) is None else traffic.message_bytes()


def record_statistics(module: nn.Module, enabled: bool = True) -> None:
    """Turns the recording of timestamps for `synchronization_stats` on or off.

    Args:
        module: A module that a strategy has wrapped.
        enabled: Whether to record subsequent passes.
    """
    if isinstance(module, DataParallelContainer):
        module.record_statistics(enabled)
    elif (traffic := traffic_of(module)) is not None:
        traffic.records_times = enabled


def synchronization_stats(module: nn.Module) -> SynchronizationStats | None:
    """Returns message sizes and times of a wrapped module's last synchronisation on this rank.

    Returns None before the first synchronisation, if `record_statistics` was not on for it, and
    for torch's DistributedDataParallel, which does not report them.
    """
    if isinstance(module, DataParallelContainer):
        return module.synchronization_stats()
    return None if (traffic := traffic_of(module)) is None else traffic.stats()


def _torch_ddp(
    module: nn.Module,
    bucket_size_mb: BucketSize | None = None,
    compression: Compression = "none",
    process_group: dist.ProcessGroup | None = None,
) -> nn.Module:
    if bucket_size_mb == "auto":
        raise UsageError("torch_ddp cannot choose a bucket size; give it a number")
    if dist.get_world_size(process_group) == 1:
        return module
    sync_buffers: dict[str, Any] = {_SYNC_BUFFERS: bool(persistent_buffers(module))}
    ddp = DistributedDataParallel(
        module,
        process_group=process_group,
        bucket_cap_mb=bucket_size_mb,
        # DDP's fastest settings: gradients are views of the buckets, and the graph is static.
        gradient_as_bucket_view=True,
        static_graph=True,
        **sync_buffers,
    )
    if compression != "none":
        _register_hook(ddp, compression)
    return ddp


_POWERSGD_RANK = 4
_POWERSGD_FROM = 2
"""The first iteration that torch's PowerSGD may compress."""


def _register_hook(ddp: DistributedDataParallel, compression: Compression) -> None:
    """Registers torch's communication hook of a compression."""
    # Imports torch's optimizers of a process group, which take a while.
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if compression == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=_POWERSGD_RANK,
            start_powerSGD_iter=_POWERSGD_FROM,
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return
    chosen = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}

    # DDP refuses the bf16 hook by its name without NCCL, although gloo sums bf16 too.
    def hook(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return chosen[compression](None, bucket)  # type: ignore[arg-type]

    ddp.register_comm_hook(None, hook)


_WRAP: dict[StrategyName, Callable[..., nn.Module]] = {
    "none": lambda module: module,
    "naive": NaiveDataParallel,
    "flat": FlatDataParallel,
    "overlapped": OverlappedDataParallel,
    "ddp": BucketedDataParallel,
    "torch_ddp": _torch_ddp,
    "zero1": BucketedDataParallel,
    "torch_zero": _torch_ddp,
    "zero2": ShardedDataParallel,
    "fsdp": FullyShardedDataParallel,
    "torch_fsdp2": apply_fsdp2,
}
