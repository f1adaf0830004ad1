"""Data parallelism in which each rank keeps a shard of gradients and optimizer state (ZeRO-2).

All ranks have all parameters. Each bucket of parameters is one flat buffer, of which every rank
owns an equal shard. Phases of one step on every rank:

1. Backward completes a gradient: it is moved into its bucket's message. When the bucket and all
   buckets before it are complete, the bucket is reduce-scattered. A received message is freed;
   only this rank's shard of the average remains.
2. Backward is over: the remaining messages are sent and waited for, and all ranks learn which
   parameters had a gradient on any rank.
3. `ShardedOptimizer.step` updates this rank's shards, and starts the all-gather of the parameters,
   one bucket at a time, in the order in which the next forward pass needs them.
4. In the next forward pass each layer waits only for its own parameters.

Every rank sends and receives the parameters' size twice per step, in 1 and in 3, as much as with an
all-reduce. But forward hides the second half, which is impossible with an all-reduce.
"""

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.core.errors import UsageError
from paceline.core.strategies import DEFAULT_BUCKET_SIZE_MB
from paceline.devices.accelerator import Moment, seconds_between
from paceline.parallel.buckets import BucketPlan
from paceline.parallel.contract import LocalGradients, is_compiled
from paceline.parallel.ddp import DataParallel, bucket_cap_bytes
from paceline.parallel.ranks.collectives import works_in_place
from paceline.parallel.reducer import GradientSynchronizer, LaunchPolicy
from paceline.parallel.traffic import SynchronizationStats
from paceline.parallel.zero.bucket import ShardedBucket, ShardedParameters
from paceline.parallel.zero.compressed import CompressedFlatParameters, CompressedShardedBucket
from paceline.parallel.zero.flat_parameters import (
    FlatParameters,
    Partition,
    ShardLayout,
    shard_evenly,
)


class ShardedDataParallel(DataParallel):
    """Reduce-scatters gradients (ZeRO-2).

    Create a `ShardedOptimizer` for its parameters. Between a step and the next forward pass,
    parameters are in flight, and reading one waits for it. After backward a parameter's gradient is
    a `ReducedGradient`: each rank has only its own shard of the actual gradient.

    Args:
        module: The model.
        bucket_size_mb: Largest bucket in MiB (2^20 bytes, as torch counts); None for one bucket
            per dtype.
        master_dtype: The dtype in which shards are stored and updated, for bf16 or fp16
            parameters; by default the parameters' own dtype.
        keywords: As in `DataParallel`: process_group, reduction_dtype, compression,
            broadcast_buffers. With compression, each rank also keeps a master of its shards, and
            parameters follow the masters by messages in 8 bits.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_size_mb: float | None = DEFAULT_BUCKET_SIZE_MB,
        *,
        master_dtype: torch.dtype | None = None,
        **keywords: Any,
    ) -> None:
        self._master_dtype = master_dtype
        self._num_passes = 0
        self._forward_waits: list[tuple[Moment, Moment]] = []
        super().__init__(
            module,
            cap_bytes=bucket_cap_bytes(bucket_size_mb),
            launch=LaunchPolicy.WHEN_READY,
            **keywords,
        )
        self._gather_hooks = GatherHooks(module, self._shared)
        self._inner_modules = tuple(module.modules())
        # Layers cannot wait inside a compiled graph. A decorator would load the compiler.
        disable: Any = torch.compiler.disable
        self._wait_before_compiled_code: Callable[[], None] = disable(self._shared.wait)

    @property
    def _synchronizes(self) -> bool:
        return True  # A single rank has shards too: its optimizer needs them.

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Runs the module; each layer waits for its own parameters.

        Args:
            arguments: Positional arguments of the module.
            keywords: Keyword arguments of the module.
        """
        if torch.compiler.is_compiling() or self._has_compiled_layer_in_flight():
            self._wait_before_compiled_code()
        output = super().forward(*arguments, **keywords)
        self._gather_hooks.learn()
        return output

    def _has_compiled_layer_in_flight(self) -> bool:
        return self._shared.are_in_flight and any(map(is_compiled, self._inner_modules))

    def record_statistics(self, enabled: bool = True) -> None:
        """Turns the recording of timestamps for `synchronization_stats` on or off.

        Args:
            enabled: Whether to record subsequent passes.
        """
        super().record_statistics(enabled)
        if enabled:
            self._shared.time_waits()

    def synchronization_stats(self) -> SynchronizationStats | None:
        """Returns message sizes and times of the last synchronisation on this rank.

        Waits for parameters in the preceding forward pass count as exposed. Returns None before
        the first synchronisation, and if `record_statistics` was not on for it.
        """
        stats = super().synchronization_stats()
        if stats is None or stats.exposed_wait_s is None:
            return stats
        waited_s = sum(seconds_between(*moments) for moments in self._forward_waits)
        return dataclasses.replace(stats, exposed_wait_s=stats.exposed_wait_s + waited_s)

    def wait_for_parameters(self) -> None:
        """Waits until all parameters have the values of the last step."""
        self._shared.wait()

    def named_parameters(self, *arguments: Any, **keywords: Any) -> Iterator[tuple[str, Any]]:
        """Waits for the parameters, and yields them with their names.

        Args:
            arguments: As for `torch.nn.Module.named_parameters`.
            keywords: As for `torch.nn.Module.named_parameters`.
        """
        self.wait_for_parameters()
        return super().named_parameters(*arguments, **keywords)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of parameters and of this rank's shards.

        Args:
            set_to_none: Whether to drop gradients instead of filling them with zeros.
        """
        with torch._C.DisableTorchFunctionSubclass():  # Gradients are never in flight: do not wait.
            self.module.zero_grad(set_to_none)  # The container's own parameters() waits.
        self._shared.zero_gradients(set_to_none=set_to_none)

    def _local_gradients(self) -> LocalGradients:
        self._shared.decide_gradients()
        shards = [shard.tensor for flat in self._shared.flats for shard in flat.shards]
        return LocalGradients(
            sharded=[shard.grad for shard in shards if shard.grad is not None],
            shard_group=self._shared.group.get(),
        )

    def _make_buckets(
        self, plans: list[BucketPlan], parameters: list[nn.Parameter], names: list[str]
    ) -> Sequence[ShardedBucket]:
        group = self._settings.group
        rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        flats = [
            self._flat_parameters(shard_evenly(plan, num_ranks), parameters, names, rank)
            for plan in plans
        ]
        # Buckets are in backward order, the shared parameters in forward order.
        self._shared = ShardedParameters(flats[::-1], self._settings.group_reference)
        return [
            self._bucket(plan, flat, rank, sends_counts=plan is plans[-1])
            for plan, flat in zip(plans, flats, strict=True)
        ]

    def _flat_parameters(
        self, layout: ShardLayout, parameters: list[nn.Parameter], names: list[str], rank: int
    ) -> FlatParameters:
        if self._compressed_queue is not None:
            return CompressedFlatParameters(
                layout,
                parameters,
                names,
                rank=rank,
                master_dtype=self._master_dtype,
                queue=self._compressed_queue,
            )
        return FlatParameters(
            layout,
            parameters,
            names,
            rank=rank,
            partition=Partition.ELEMENTS,
            master_dtype=self._master_dtype,
        )

    def _bucket(
        self, plan: BucketPlan, flat: FlatParameters, rank: int, *, sends_counts: bool
    ) -> ShardedBucket:
        if self._compressed_queue is not None and self._compression is not None:
            return CompressedShardedBucket(
                plan,
                flat,
                self._shared,
                code=self._compression,
                queue=self._compressed_queue,
                rank=rank,
                sends_counts=sends_counts,
            )
        return ShardedBucket(
            plan,
            flat,
            self._shared,
            message_dtype=self._message_dtype(plan.dtype),
            sends_counts=sends_counts,
        )

    def _message_dtype(self, dtype: torch.dtype) -> torch.dtype:
        # On a CPU ranks sum received messages in the master's dtype; NCCL sums in the message's.
        sums = self._master_dtype if works_in_place(self._settings.device) else None
        return self._settings.reduction_dtype or sums or dtype

    def _prepare(self) -> GradientSynchronizer:
        if self._num_passes > 0 and not self._shared.has_optimizer:
            raise UsageError(
                "gradients were reduce-scattered, but no ShardedOptimizer updates the shards; "
                "create one for this container's parameters; a plain optimizer sees no gradients"
            )
        return super()._prepare()

    def _follow_changes(self, *, agree: bool) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # No parameter value is read: do not wait.
            unknown = [
                name
                for name, parameter in self.module.named_parameters()
                if parameter.requires_grad and parameter not in self._shared
            ]
        for name in unknown:
            raise UsageError(
                f"parameter {name!r} was frozen or not in the model when its container was "
                "created, so no rank has a shard of it; wrap the model again, and load the "
                "optimizer's state"
            )

    def _describe_settings(self) -> str:
        return f"{super()._describe_settings()}, master {self._master_dtype}"

    def _finish_backward(self) -> None:
        """Completes a pass after all its messages have been received."""
        self._num_passes += 1
        self._forward_waits = self._shared.take_waits()


class GatherHooks:
    """Waits for parameters before the module uses, saves or loads them."""

    def __init__(self, root: nn.Module, parameters: ShardedParameters) -> None:
        self._root = weakref.ref(root)
        self._parameters = parameters
        self._called: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._own: weakref.WeakKeyDictionary[nn.Module, list[FlatParameters]] = (
            weakref.WeakKeyDictionary()
        )
        self._needed: Mapping[nn.Module, list[FlatParameters]] | None = None
        """The parameters that each module waits for; None before the first forward pass."""
        flat_of = {parameter: flat for flat in parameters.flats for parameter in flat.parameters}
        for module in root.modules():
            flats = (flat_of[p] for p in module.parameters(recurse=False) if p in flat_of)
            self._own[module] = list(dict.fromkeys(flats))
            # Runs before other hooks, which may compute parameters from parameters.
            module.register_forward_pre_hook(_Hook(self, GatherHooks.before), prepend=True)
            # Submodules may also be saved and loaded separately.
            wait, refresh = (
                _Hook(self, action) for action in (GatherHooks.wait, GatherHooks.refresh)
            )
            module.register_state_dict_pre_hook(wait)  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(wait)  # type: ignore[no-untyped-call]
            module.register_load_state_dict_post_hook(refresh)  # type: ignore[no-untyped-call]

    def before(self, module: nn.Module) -> None:
        """Waits for the parameters of a module that is about to be called."""
        if self._needed is None:
            self._called.add(module)
            self._parameters.wait()
            return
        for flat in self._needed.get(module, ()):
            flat.wait()

    def wait(self, _module: nn.Module) -> None:
        """Waits for all parameters."""
        self._parameters.wait()

    def refresh(self, module: nn.Module) -> None:
        """Updates the master copies of a module's loaded parameters."""
        for flat in self._own.get(module, ()):
            flat.refresh_master()

    def learn(self) -> None:
        """Assigns parameters to waiting modules, after the first forward pass."""
        root = self._root()
        if self._needed is not None or root is None:
            return
        needed: weakref.WeakKeyDictionary[nn.Module, list[FlatParameters]] = (
            weakref.WeakKeyDictionary()
        )

        def visit(module: nn.Module, caller: nn.Module) -> None:
            if module in self._called:
                caller = module
            for reader in {module, caller}:
                known = needed.setdefault(reader, [])
                known += [flat for flat in self._own.get(module, ()) if flat not in known]
            for child in module.children():
                visit(child, caller)

        visit(root, root)
        self._needed = needed


class _Hook:
    """Calls a method of a weakly referenced object; copies of the hook do nothing."""

    def __init__(
        self, target: GatherHooks, action: Callable[[GatherHooks, nn.Module], None]
    ) -> None:
        self._target = weakref.ref(target)
        self._action = action

    def __call__(self, module: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return  # The container waits before it calls compiled code.
        if (target := self._target()) is not None:
            self._action(target, module)

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return _make_idle_hook, ()


def _make_idle_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: Any) -> None:
    pass
