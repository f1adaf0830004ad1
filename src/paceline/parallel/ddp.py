"""The four containers that average gradients, from the simplest to the recommended one.

All start with equal parameters on all ranks, which process different data, and average the
gradients, so the parameters stay equal. They differ in how gradients are divided into messages and
when the messages start.

1. `NaiveDataParallel`: backward; then for each parameter in reverse order: all-reduce, wait. The
   simplest correct container, and the baseline of the others: it pays the latency of one call per
   parameter and overlaps nothing.
2. `FlatDataParallel`: backward collects gradients in one buffer; then one all-reduce of the buffer
   (one per dtype). It pays the latency of one call and overlaps nothing.
3. `OverlappedDataParallel`: during backward, a parameter's all-reduce starts when its gradient is
   complete; after backward, it waits for all. Backward hides communication, but each parameter
   pays the latency of one call.
4. `BucketedDataParallel`: during backward, a bucket's all-reduce starts when its gradients are
   complete and the buckets before it have started; after backward, it waits for all. Large buckets
   need fewer calls, small ones leave less communication exposed after backward.

A gradient's way: its hook (`reducer`) moves it into its bucket (`buckets`), whose all-reduce leaves
the average in place. Training loops need not know which container they use: gradients are averaged
when ``backward()`` returns. Loops that call `finish_gradient_synchronization`, such as those of
courses, are supported: it then has nothing left to do.

With an automatic bucket size, the container observes the first steps. At the end of the last of
them, where all ranks synchronise anyway, the ranks agree on a size, and the next pass begins with
new buckets.
"""

import logging
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from paceline.core.errors import UsageError
from paceline.core.strategies import DEFAULT_BUCKET_SIZE_MB
from paceline.core.units import MIB
from paceline.parallel.bucket_size import BucketSizeChoice, BucketSizeTuner
from paceline.parallel.buckets import (
    Bucket,
    BucketPlan,
    GradientBucket,
    give_missing_gradients,
    plan_buckets,
    tensor_spec,
)
from paceline.parallel.compression.bucket import CompressedBucket
from paceline.parallel.compression.codec import CodeName
from paceline.parallel.compression.queue import CompressedQueue
from paceline.parallel.compression.residual import HasResiduals, Residual
from paceline.parallel.contract import (
    DataParallelContainer,
    LocalGradients,
    persistent_buffers,
    require_supported,
)
from paceline.parallel.ranks.collectives import resolve_group
from paceline.parallel.ranks.pending import collective_error
from paceline.parallel.reducer import (
    OUTSIDE_BACKWARD,
    GradientSynchronizer,
    LaunchPolicy,
    Settings,
    call_weakly,
    current_pass,
    tensors_in,
)
from paceline.parallel.same_model import (
    Changes,
    broadcast_tensors,
    describe_change,
    describe_model,
    require_same_model,
)
from paceline.parallel.traffic import SynchronizationStats

_logger = logging.getLogger(__name__)


_Trained: TypeAlias = list[tuple[nn.Parameter, bool]]
"""All parameters, and whether each is trained."""


class DataParallel(DataParallelContainer):
    """A module whose gradients are averaged over the ranks of a group.

    Args:
        module: The model, on its final device and in its final dtype. All ranks receive the values
            of the group's first rank, including frozen parameters and buffers.
        cap_bytes: Largest bucket; None for one per dtype, zero for one per parameter.
        launch: When communication starts.
        process_group: The ranks to average over, as a group or a one-dimensional mesh; by default
            all ranks.
        reduction_dtype: The dtype in which gradients are summed and sent: float32 to avoid rounding
            in sums of bf16 or fp16 gradients, bfloat16 to halve the traffic of fp32 gradients. By
            default each gradient's own dtype.
        compression: "int8" or "int4" to send gradients in so many bits, and their sum back in 8;
            what is left out is added to the next step's gradients. All ranks still end with the
            same bits.
        broadcast_buffers: Whether to copy the first rank's persistent buffers (batch norm
            statistics, for example) to all ranks before every training forward pass. Buffers that
            are not in the state dictionary are broadcast once, at creation.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        cap_bytes: float | None,
        launch: LaunchPolicy,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        reduction_dtype: torch.dtype | None = None,
        compression: CodeName | None = None,
        broadcast_buffers: bool = True,
    ) -> None:
        super().__init__(module, resolve_group(process_group), require_supported(module))
        if reduction_dtype is not None and not reduction_dtype.is_floating_point:
            raise UsageError(
                f"reduction_dtype must be a floating-point dtype, got {reduction_dtype}"
            )
        if compression is not None and reduction_dtype is not None:
            raise UsageError(
                f"compression {compression!r} sends gradients in codes, so reduction_dtype has no "
                "effect; leave one of them out"
            )
        self._cap_bytes = cap_bytes
        self._compression = compression
        self._compressed_queue: CompressedQueue | None = None
        self._left_out: dict[nn.Parameter, Tensor] = {}
        """What compressed messages had left out of gradients when the buckets were rebuilt."""
        self._settings = Settings(
            group_reference=self._group_reference,
            device=self._device,
            launch=launch,
            reduction_dtype=reduction_dtype,
        )
        self._built: _Trained = []
        """The parameters for which the current buckets were built."""
        self._agreed: _Trained = []
        """The parameters on which all ranks last agreed."""
        self._is_agreed = True
        self._changes: Changes | None = None
        self._synchronizer: GradientSynchronizer | None = None
        self._replicated_buckets: list[Bucket] = []
        self._num_builds = 0
        self._state_buffers: list[str] = []
        if self._synchronizes:
            self._require_same_model()
            self._agreed = _trained_now(module)
            self._changes = Changes(self._group_reference, self._device)
            broadcast_tensors([*module.parameters(), *module.buffers()], self.process_group)
            if compression is not None and self.is_distributed:
                self._compressed_queue = CompressedQueue(self.process_group, self._device)
            self._build()
            if broadcast_buffers:
                self._state_buffers = list(persistent_buffers(module))

    @property
    def _synchronizes(self) -> bool:
        """Whether this container synchronises gradients at all."""
        return self.is_distributed

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Runs the module.

        Args:
            arguments: Positional arguments of the module.
            keywords: Keyword arguments of the module.
        """
        if not (self._synchronizes and torch.is_grad_enabled()):
            return self.module(*arguments, **keywords)
        synchronizer = self._prepare()
        output = self.module(*arguments, **keywords)
        synchronizer.watch_outputs(
            list(tensors_in(output)), average=self._sync_state.forward_synchronizes
        )
        return output

    def finish_gradient_synchronization(self) -> None:
        """Ensures that gradients are averaged; does nothing if they already are.

        Backward averages gradients by itself. A rank whose training pass completed no gradient, or
        that skipped backward, joins the collectives here and contributes zeros.
        """
        if self._synchronizer is None:
            return
        if self._sync_state.forward_is_pending and not self._synchronizer.in_backward:
            self._synchronizer.begin_reduction(self._synchronizer.begin(average=True))
        self._synchronizer.send_rest()
        self._synchronizer.receive_rest()

    def synchronization_stats(self) -> SynchronizationStats | None:
        """Returns message sizes and times of the last synchronisation on this rank.

        Returns None before the first synchronisation, and if `record_statistics` was not on for it.
        """
        return None if self._synchronizer is None else self._synchronizer.stats()

    def message_bytes(self) -> list[int]:
        """Returns the size of each gradient message in the last synchronisation."""
        return [] if self._synchronizer is None else self._synchronizer.message_bytes()

    def residuals(self) -> list[Residual]:
        """Returns what compressed messages have left out of gradients; empty without compression.

        They belong to a checkpoint. The next backward pass that averages may begin with others.
        """
        return [
            residual
            for bucket in ([] if self._synchronizer is None else self._synchronizer.buckets)
            if isinstance(bucket, HasResiduals)
            for residual in bucket.residuals()
        ]

    def _arrived(self) -> dict[str, bool]:
        if self._synchronizer is None:
            return {}
        names = (name for name, _ in self._trained())
        return dict(zip(names, map(bool, self._synchronizer.arrived), strict=True))

    def _local_gradients(self) -> LocalGradients:
        gradients = [parameter.grad for parameter in self.module.parameters()]
        return LocalGradients(replicated=[grad for grad in gradients if grad is not None])

    def _prepare(self) -> GradientSynchronizer:
        """Prepares for a forward pass that records gradients."""
        assert self._synchronizer is not None
        sync_state = self._sync_state
        sync_state.forward_synchronizes = sync_state.synchronize
        if current_pass() != OUTSIDE_BACKWARD:
            return self._synchronizer  # Activation checkpointing recomputes this forward pass.
        self._synchronizer.forget_broken_pass()
        if sync_state.synchronize:
            # Evaluation may run on a single rank, so it must not communicate.
            self._follow_changes(agree=self.training)
        if sync_state.synchronize and self.training:
            sync_state.forward_is_pending = True
            if self._state_buffers:
                self._broadcast_buffers()
        return self._synchronizer

    def _broadcast_buffers(self) -> None:
        named = dict(self.module.named_buffers())
        buffers = [named[name] for name in self._state_buffers]
        try:
            broadcast_tensors(buffers, self.process_group)
        except RuntimeError as error:
            num_bytes = sum(buffer.nbytes for buffer in buffers)
            raise collective_error("broadcast of buffers", num_bytes, error) from error

    def _follow_changes(self, *, agree: bool) -> None:
        """Rebuilds the buckets if parameters were frozen, unfrozen or replaced since the last pass.

        With `agree`, all ranks run this pass and compare their models now; otherwise they compare
        when backward completes a gradient that is to be averaged.
        """
        current = _trained_now(self.module)
        self._is_agreed = _is_same(current, self._agreed)
        if agree and not self._is_agreed:
            self._agree(current)
        if not _is_same(current, self._built):
            self._build()

    def _agree(self, current: "_Trained") -> None:
        assert self._changes is not None
        names = [name for name, _ in self.module.named_parameters()]
        change = describe_change(names, self._agreed, current)
        lines = describe_model(self.module, self._describe_settings())
        if not self._changes.agree(change, lines):
            self._require_same_model()
        self._agreed = current
        self._is_agreed = True

    def _agree_in_backward(self) -> None:
        if not self._is_agreed:
            self._agree(_trained_now(self.module))

    def _finish_backward(self) -> None:
        """Completes a pass after all its messages have been received."""
        give_missing_gradients(self._replicated_buckets)

    def _require_same_model(self) -> None:
        settings = self._settings
        require_same_model(self.module, self._describe_settings(), settings.group, settings.device)

    def _describe_settings(self) -> str:
        """Returns the settings that must be equal on all ranks, as text."""
        settings = self._settings
        return (
            f"bucket cap {self._cap_bytes}, {settings.launch.name}, "
            f"reduction_dtype {settings.reduction_dtype}, compression {self._compression}"
        )

    def _build(self) -> None:
        """Builds buckets and hooks for the parameters that are currently trained."""
        self._left_out = {
            parameter: tensor
            for bucket in self._replicated_buckets
            if isinstance(bucket, CompressedBucket)
            for parameter, tensor in bucket.left_out().items()
        }
        if self._synchronizer is not None:
            self._synchronizer.close()
            # Frees the old buffers before the new ones are allocated.
            self._synchronizer, self._replicated_buckets = None, []
        self._num_builds += 1
        self._built = _trained_now(self.module)
        trained = self._trained()
        names = [name for name, _ in trained]
        parameters = [parameter for _, parameter in trained]
        plans = plan_buckets([tensor_spec(p) for p in parameters], self._cap_bytes)
        self._synchronizer = GradientSynchronizer(
            names,
            parameters,
            self._make_buckets(plans, parameters, names),
            settings=self._settings,
            sync_state=self._sync_state,
        )
        self._left_out = {}
        self._synchronizer.before_run = call_weakly(self._agree_in_backward)
        self._synchronizer.after_run = call_weakly(self._finish_backward)

    def _make_buckets(
        self, plans: list[BucketPlan], parameters: list[nn.Parameter], names: list[str]
    ) -> Sequence[GradientBucket]:
        """Creates the buckets for the gradients."""
        dtype = self._settings.reduction_dtype
        if self._compressed_queue is None or self._compression is None:
            self._replicated_buckets = [Bucket(plan, parameters, names, dtype) for plan in plans]
            return self._replicated_buckets
        self._replicated_buckets = [
            CompressedBucket(
                plan,
                parameters,
                names,
                outward=self._compression,
                queue=self._compressed_queue,
                group=self.process_group,
                left_out=self._left_out,
            )
            for plan in plans
        ]
        return self._replicated_buckets

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [named for named in self.module.named_parameters() if named[1].requires_grad]


def _trained_now(module: nn.Module) -> _Trained:
    return [(parameter, parameter.requires_grad) for parameter in module.parameters()]


def _is_same(one: _Trained, other: _Trained) -> bool:
    return len(one) == len(other) and all(
        parameter is known and is_trained == was_trained
        for (parameter, is_trained), (known, was_trained) in zip(one, other, strict=True)
    )


class NaiveDataParallel(DataParallel):
    """Averages gradients one parameter at a time after backward.

    Args:
        module: The model.
        keywords: As in `DataParallel`: process_group, reduction_dtype, broadcast_buffers.
    """

    def __init__(self, module: nn.Module, **keywords: Any) -> None:
        super().__init__(module, cap_bytes=0, launch=LaunchPolicy.ONE_BY_ONE, **keywords)


class FlatDataParallel(DataParallel):
    """Averages all gradients in one message per dtype after backward.

    Args:
        module: The model.
        keywords: As in `DataParallel`: process_group, reduction_dtype, broadcast_buffers.
    """

    def __init__(self, module: nn.Module, **keywords: Any) -> None:
        super().__init__(module, cap_bytes=None, launch=LaunchPolicy.AFTER_BACKWARD, **keywords)


class OverlappedDataParallel(DataParallel):
    """Averages gradients one parameter at a time during backward.

    Args:
        module: The model.
        keywords: As in `DataParallel`: process_group, reduction_dtype, broadcast_buffers.
    """

    def __init__(self, module: nn.Module, **keywords: Any) -> None:
        super().__init__(module, cap_bytes=0, launch=LaunchPolicy.WHEN_READY, **keywords)


class BucketedDataParallel(DataParallel):
    """Averages gradients one bucket at a time during backward.

    Args:
        module: The model.
        bucket_size_mb: Largest bucket in MiB (2^20 bytes, as torch counts); None for one bucket
            per dtype; "auto" to choose from measurements of the group and the first steps.
        keywords: As in `DataParallel`: process_group, reduction_dtype, broadcast_buffers.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_size_mb: float | Literal["auto"] | None = DEFAULT_BUCKET_SIZE_MB,
        **keywords: Any,
    ) -> None:
        size_mb = DEFAULT_BUCKET_SIZE_MB if bucket_size_mb == "auto" else bucket_size_mb
        cap_bytes = bucket_cap_bytes(size_mb)
        self.bucket_size_choice: BucketSizeChoice | None = None
        """The choice of "auto" and its reasons; None before the choice, and without "auto"."""
        self._tuner: BucketSizeTuner | None = None
        self._has_new_size = False
        super().__init__(module, cap_bytes=cap_bytes, launch=LaunchPolicy.WHEN_READY, **keywords)
        if bucket_size_mb == "auto" and self.is_distributed:
            self._tuner = BucketSizeTuner(self._settings)
            self._watch(self._tuner)

    def _follow_changes(self, *, agree: bool) -> None:
        num_builds = self._num_builds
        super()._follow_changes(agree=agree)
        if self._has_new_size:
            self._has_new_size = False
            self._build()
        if self._tuner is not None and self._num_builds > num_builds:
            self._watch(self._tuner)

    def _watch(self, tuner: BucketSizeTuner) -> None:
        """Restarts the tuner's observation with the first step of the current buckets."""
        assert self._synchronizer is not None
        tuner.forget()
        self._synchronizer.records_times = True

    def _finish_backward(self) -> None:
        super()._finish_backward()
        if self._tuner is not None:
            self._learn(self._tuner)

    def _learn(self, tuner: BucketSizeTuner) -> None:
        """Records the last step, and chooses a size when enough steps have been observed."""
        assert self._synchronizer is not None
        arrivals_s = self._synchronizer.arrivals_s()
        if not arrivals_s:
            return
        tuner.observe(arrivals_s)
        if not tuner.has_seen_enough:
            return
        choice = tuner.choose([tensor_spec(p) for _, p in self._trained()])
        if dist.get_rank(self.process_group) == 0:
            _logger.info("%s", choice.explain())
        self._tuner = None
        self.bucket_size_choice = choice
        self._cap_bytes = choice.bucket_size_mb * MIB
        self._has_new_size = True


def bucket_cap_bytes(size_mb: float | None) -> float | None:
    """Returns a bucket size in bytes; raises if it is not a positive number or None."""
    if size_mb is None:
        return None
    if not (isinstance(size_mb, (int, float)) and size_mb > 0):
        raise UsageError(
            f'bucket_size_mb must be a positive number, None, or "auto" where gradients are '
            f"averaged in buckets; got {size_mb!r}"
        )
    return size_mb * MIB
