"""Data parallelism in which each rank keeps a shard of gradients and optimizer state (ZeRO-2).

All ranks have all parameters, each bucket of them in one flat buffer, of which every rank has an
equal shard. Phases of one step on every rank:

1. Backward completes a gradient: it moves into its bucket's message. When the bucket and all before
   it are complete, the bucket is reduce-scattered. A message that has arrived is freed; what stays
   is this rank's shard of the average.
2. Backward is over: what is left is sent and waited for, and all ranks know which parameters had a
   gradient anywhere.
3. `ShardedOptimizer.step` updates this rank's shards, and starts the all-gather of the parameters,
   bucket by bucket, in the order in which the next forward pass needs them.
4. In the next forward pass each layer waits for its own parameters only.

Every rank sends and receives the parameters' size twice per step, in 1 and in 3, as much as an
all-reduce does; but forward hides the second half, which it cannot do for an all-reduce.

If the container steps in backward, a bucket is updated and sent when its sum has arrived, while
backward goes on. A norm over all gradients, or whether they are all finite, is known only later,
so clipping is refused there, and so is going on without the optimizer's step.

On a mesh of two dimensions, replicate x shard, gradients are reduce-scattered along the second, and
each shard is all-reduced along the first (hybrid sharding).
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
from paceline.parallel.buckets import BucketPlan
from paceline.parallel.partition import Partition, shard_evenly
from paceline.parallel.ranks.device_clock import Moment, seconds_between
from paceline.parallel.ranks.pending import Pending
from paceline.parallel.ranks.reduce_scatter import sends_directly, works_in_place
from paceline.parallel.reducer.backward_pass import SynchronizationStats
from paceline.parallel.reducer.base import DataParallel, bucket_cap_bytes
from paceline.parallel.reducer.gradient_norm import LocalGradients
from paceline.parallel.reducer.module_checks import is_compiled
from paceline.parallel.reducer.settings import GroupReference, LaunchPolicy
from paceline.parallel.reducer.synchronizer import GradientSynchronizer
from paceline.parallel.zero.bucket import ShardedBucket
from paceline.parallel.zero.flat_parameters import FlatParameters
from paceline.parallel.zero.gather_hooks import GatherHooks
from paceline.parallel.zero.registry import ShardedParameters, find_sharded_parameters
from paceline.parallel.zero.used_parameters import UsedParameters

StepMode = Literal["after_backward", "in_backward"]
_Arguments = ParamSpec("_Arguments")


class ShardedDataParallel(DataParallel):
    """Reduce-scatters gradients (ZeRO-2); further keywords as in `DataParallel`.

    Make a `ShardedOptimizer` of its parameters. Between a step and the next forward pass,
    parameters are in flight, and whoever reads one waits for it. After backward a parameter's
    gradient is a `ReducedGradient`: each rank has its own shard of the real one only.

    Args:
        module: The model.
        bucket_size_mb: Largest bucket in MiB (2^20 bytes, as torch counts); None for one bucket
            per dtype.
        step_mode: "after_backward", or "in_backward" to update each bucket as its sum arrives.
        master_dtype: What shards are kept and updated in, for parameters in bf16 or fp16;
            by default the parameters' own dtype.
        process_group: The ranks, as a group, a mesh of one dimension, or a mesh of two over all
            ranks: replicate x shard.
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
        # Inside of a compiled graph no layer can wait. Not a decorator: that loads the compiler.
        disable: Any = torch.compiler.disable
        self._wait_before_compiled_code: Callable[[], None] = disable(self._shared.wait)

    @property
    def _synchronizes(self) -> bool:
        return True  # One rank has shards too, so that its optimizer finds them.

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Runs the module; each layer waits for its own parameters.

        Args:
            arguments: As the module takes them.
            keywords: As the module takes them.
        """
        if torch.compiler.is_compiling() or self._has_compiled_layer_in_flight():
            self._wait_before_compiled_code()
        output = super().forward(*arguments, **keywords)
        self._gather_hooks.learn()
        return output

    def _has_compiled_layer_in_flight(self) -> bool:
        return self._shared.are_in_flight and any(map(is_compiled, self._inner_modules))

    def record_statistics(self, enabled: bool = True) -> None:
        """Has the moments of the passes to come kept for `synchronization_stats`, or no longer.

        Args:
            enabled: Whether to keep them.
        """
        super().record_statistics(enabled)
        if enabled:
            self._shared.time_waits()

    def synchronization_stats(self) -> SynchronizationStats | None:
        """Returns sizes and times of the last synchronisation on this rank.

        What the forward pass before it has waited for parameters counts as exposed. None before
        it, and where nobody has asked to `record_statistics` before.
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
            arguments: As `torch.nn.Module` takes them.
            keywords: As `torch.nn.Module` takes them.
        """
        self.wait_for_parameters()
        return super().named_parameters(*arguments, **keywords)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of parameters and of this rank's shards.

        Args:
            set_to_none: Whether gradients are dropped, or kept and filled with zeros.
        """
        with torch._C.DisableTorchFunctionSubclass():  # No gradient is in flight.
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
            # One that steps on arrival has to know at once which of its parameters have gradients.
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
            # Backward reaches the last layers first, forward the first.
            [bucket.flat for bucket in reversed(self._buckets)],
            parameter_group,
            used,
            steps_in_backward=steps_in_backward,
        )
        return self._buckets

    def _message_dtype(self, dtype: torch.dtype) -> torch.dtype:
        # On a CPU ranks add up in the master's dtype what they are sent; NCCL adds on the way.
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
        with torch._C.DisableTorchFunctionSubclass():  # None of this needs a value.
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
        """Takes in a bucket's sum, or has it averaged with those of the replicas first."""
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
        """Ends a pass: all sums are here."""
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
    """Returns a call of a method whose owner it does not keep alive: no cycle, no wait for one."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: _Arguments.args, **keywords: _Arguments.kwargs) -> None:
        if (alive := reference()) is not None:
            alive(*arguments, **keywords)

    return call


def _copy_of(group: GroupReference, device: torch.device) -> GroupReference:
    """Returns a second group of the same ranks.

    Which sums have arrived when a bucket is sent differs by rank. Collectives of one group must
    have the same order on all ranks, so that parameters need a group of their own beside gradients.
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
    """Returns the group of replicas and that of shards of a mesh of two dimensions."""
    if mesh.size() != dist.get_world_size():
        raise UsageError(
            f"a mesh of two dimensions must hold all {dist.get_world_size()} ranks, this one has "
            f"{mesh.size()}; use a mesh of one dimension over some of them"
        )
    return GroupReference(mesh.get_group(0)), GroupReference(mesh.get_group(1))
