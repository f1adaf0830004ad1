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

If the container steps in backward, a bucket is updated and sent when its sum has arrived, while
backward continues. The norm of all gradients, and whether all are finite, is known only later, so
this mode rejects clipping and skipped optimizer steps.

On a two-dimensional mesh, replicate x shard, gradients are reduce-scattered along the second
dimension, and each shard is all-reduced along the first (hybrid sharding).
"""

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, ParamSpec

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from paceline.core.errors import UsageError
from paceline.core.ranges import WAIT
from paceline.core.strategies import DEFAULT_BUCKET_SIZE_MB
from paceline.kernels.named_range import named_range
from paceline.parallel.backward_pass import GroupReference, LaunchPolicy, SynchronizationStats
from paceline.parallel.buckets import BucketPlan
from paceline.parallel.contract import LocalGradients
from paceline.parallel.ddp import DataParallel, bucket_cap_bytes
from paceline.parallel.module_checks import is_compiled
from paceline.parallel.partition import Partition, shard_evenly
from paceline.parallel.ranks.collectives import sends_directly, works_in_place
from paceline.parallel.ranks.device_clock import Moment, seconds_between
from paceline.parallel.ranks.pending import Pending
from paceline.parallel.reducer import GradientSynchronizer
from paceline.parallel.zero.bucket import ShardedBucket, UsedParameters
from paceline.parallel.zero.flat_parameters import FlatParameters
from paceline.parallel.zero.registry import GatherHooks, ShardedParameters, find_sharded_parameters

StepMode = Literal["after_backward", "in_backward"]
_Arguments = ParamSpec("_Arguments")


class ShardedDataParallel(DataParallel):
    """Reduce-scatters gradients (ZeRO-2).

    Create a `ShardedOptimizer` for its parameters. Between a step and the next forward pass,
    parameters are in flight, and reading one waits for it. After backward a parameter's gradient is
    a `ReducedGradient`: each rank has only its own shard of the actual gradient.

    Args:
        module: The model.
        bucket_size_mb: Largest bucket in MiB (2^20 bytes, as torch counts); None for one bucket
            per dtype.
        step_mode: "after_backward", or "in_backward" to update each bucket as its sum arrives.
        master_dtype: The dtype in which shards are stored and updated, for bf16 or fp16
            parameters; by default the parameters' own dtype.
        process_group: The ranks, as a group, a one-dimensional mesh, or a two-dimensional mesh
            over all ranks: replicate x shard.
        keywords: As in `DataParallel`: reduction_dtype, broadcast_buffers.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_size_mb: float | None = DEFAULT_BUCKET_SIZE_MB,
        *,
        step_mode: StepMode = "after_backward",
        master_dtype: torch.dtype | None = None,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        **keywords: Any,
    ) -> None:
        if step_mode not in ("after_backward", "in_backward"):
            raise UsageError(
                f'step_mode must be "after_backward" or "in_backward", got {step_mode!r}'
            )
        self._step_mode = step_mode
        self._master_dtype = master_dtype
        self._mesh_groups: tuple[GroupReference, GroupReference] | None = None
        if isinstance(process_group, DeviceMesh) and process_group.ndim == 2:
            self._mesh_groups = _groups_of(process_group)
            process_group = None
        self._num_passes = 0
        self._forward_waits: list[tuple[Moment, Moment]] = []
        self._buckets: list[ShardedBucket] = []
        self._landed: list[tuple[ShardedBucket, Pending, Tensor]] = []
        super().__init__(
            module,
            cap_bytes=bucket_cap_bytes(bucket_size_mb),
            launch=LaunchPolicy.WHEN_READY,
            process_group=process_group,
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
            super().zero_grad(set_to_none)
        self._shared.zero_gradients(set_to_none=set_to_none)

    def _local_gradients(self) -> LocalGradients:
        if self._shared.steps_in_backward:
            raise UsageError(
                "gradients cannot be clipped when buckets step in backward: their norm is known "
                'only after backward; use step_mode="after_backward"'
            )
        self._shared.decide_gradients()
        shards = [shard.tensor for flat in self._shared.flats for shard in flat.shards]
        return LocalGradients(
            sharded=[shard.grad for shard in shards if shard.grad is not None],
            shard_group=self._shared.group.get(),
        )

    def _make_buckets(
        self, plans: list[BucketPlan], parameters: list[nn.Parameter], names: list[str]
    ) -> Sequence[ShardedBucket]:
        if self._mesh_groups is None:
            shard_group = self._settings.group_reference
        else:
            _, shard_group = self._mesh_groups
        rank = dist.get_rank(shard_group.get())
        num_ranks = dist.get_world_size(shard_group.get())
        device = self._settings.device
        steps_in_backward = self._step_mode == "in_backward"
        used = UsedParameters(len(parameters), device)
        self._buckets = []
        for number, plan in enumerate(plans):
            flat = FlatParameters(
                shard_evenly(plan, num_ranks),
                parameters,
                names,
                rank=rank,
                partition=Partition.ELEMENTS,
                master_dtype=self._master_dtype,
            )
            # A bucket that steps on arrival must know immediately which parameters have gradients.
            self._buckets.append(
                ShardedBucket(
                    plan,
                    flat,
                    UsedParameters(len(plan.slots), device) if steps_in_backward else used,
                    range(len(plan.slots)) if steps_in_backward else [s.tensor for s in plan.slots],
                    message_dtype=self._message_dtype(plan.dtype),
                    shard_group=shard_group.get,
                    when_landed=_weakly(self._land),
                    sends_counts=steps_in_backward or number == len(plans) - 1,
                )
            )
        parameter_group = shard_group
        if steps_in_backward and not sends_directly(shard_group.get(), device):
            parameter_group = _copy_of(shard_group, device)
        self._shared = ShardedParameters(
            # Buckets are in backward order, flats in forward order.
            [bucket.flat for bucket in reversed(self._buckets)],
            parameter_group,
            used,
            steps_in_backward=steps_in_backward,
        )
        return self._buckets

    def _message_dtype(self, dtype: torch.dtype) -> torch.dtype:
        # On a CPU ranks sum received messages in the master's dtype; NCCL sums in the message's.
        sums = self._master_dtype if works_in_place(self._settings.device) else None
        return self._settings.reduction_dtype or sums or dtype

    def _prepare(self) -> GradientSynchronizer:
        if self._shared.has_stepped and self._sync_state.synchronize and self.training:
            raise UsageError(
                "this container has updated parameters in backward, and the optimizer's step() was "
                "not called since; call it after every synchronized backward, and accumulate in "
                'no_sync(). To skip steps, use step_mode="after_backward"'
            )
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
                if parameter.requires_grad
                and find_sharded_parameters(parameter) is not self._shared
            ]
        for name in unknown:
            raise UsageError(
                f"parameter {name!r} was frozen or not in the model when its container was "
                "created, so no rank has a shard of it; wrap the model again, and load the "
                "optimizer's state"
            )

    def _describe_settings(self) -> str:
        return f"{super()._describe_settings()}, {self._step_mode}, master {self._master_dtype}"

    def _land(self, bucket: ShardedBucket) -> None:
        """Adds a bucket's sum to the gradients, or starts its all-reduce over replicas first."""
        is_accumulating = bucket.is_accumulating
        if is_accumulating:
            bucket.zero_what_has_no_gradient()
        if self._mesh_groups is None:
            bucket.add_sum_to(bucket.flat.gradient, overwrite=not is_accumulating)
            self._give_gradients(bucket)
            return
        total = torch.empty_like(bucket.flat.gradient) if is_accumulating else bucket.flat.gradient
        bucket.add_sum_to(total, overwrite=True)
        replicas, _ = self._mesh_groups
        work = dist.all_reduce(total, group=replicas.get(), async_op=True)
        pending = Pending("all_reduce of a shard over replicas", total.nbytes, [work], total.device)
        self._landed.append((bucket, pending, total))

    def _give_gradients(self, bucket: ShardedBucket) -> None:
        bucket.give_gradients()
        if self._shared.steps_in_backward:
            bucket.used.decide_gradients([bucket.flat])
            self._shared.step_flat(bucket.flat)

    def _settle(self) -> None:
        """Completes a pass after all its messages have been received."""
        self._num_passes += 1
        self._forward_waits = self._shared.take_waits()
        for bucket, pending, total in self._landed:
            with named_range(WAIT):
                pending.wait()
            if total is not bucket.flat.gradient:
                bucket.flat.gradient.add_(total)
            self._give_gradients(bucket)
        self._landed.clear()


def _weakly(method: Callable[_Arguments, None]) -> Callable[_Arguments, None]:
    """Returns a function that calls a method without keeping its object alive in a cycle."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: _Arguments.args, **keywords: _Arguments.kwargs) -> None:
        if (alive := reference()) is not None:
            alive(*arguments, **keywords)

    return call


def _copy_of(group: GroupReference, device: torch.device) -> GroupReference:
    """Returns a second group of the same ranks.

    Collectives of one group must have the same order on all ranks. The sums that have arrived when
    a bucket is sent differ by rank, so parameters and gradients need separate groups.
    """
    original = group.get()
    backend = original._get_backend(device)
    copy = dist.new_group(
        dist.get_process_group_ranks(original),
        timeout=backend.options._timeout,
        backend=dist.get_backend(original),
        use_local_synchronization=True,
        device_id=original.bound_device_id,
    )
    assert isinstance(copy, dist.ProcessGroup)
    return GroupReference(copy)


def _groups_of(mesh: DeviceMesh) -> tuple[GroupReference, GroupReference]:
    """Returns the groups of replicas and of shards of a two-dimensional mesh."""
    if mesh.size() != dist.get_world_size():
        raise UsageError(
            f"a mesh of two dimensions must hold all {dist.get_world_size()} ranks, this one has "
            f"{mesh.size()}; use a mesh of one dimension over some of them"
        )
    return GroupReference(mesh.get_group(0)), GroupReference(mesh.get_group(1))
