"""The base of all data-parallel containers.

A container holds a module whose copies on all ranks start out equal, sees different data on
each, and averages the gradients, so that the copies stay equal. How the gradients are divided
into messages and when these are sent is all that the containers differ in.

Training loops need not know the container: gradients are right when ``backward()`` returns.
`finish_gradient_synchronization`, which the courses' loops call, finds nothing left to do then.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from paceline.core.errors import UsageError
from paceline.core.units import MIB
from paceline.parallel.buckets import (
    Bucket,
    BucketPlan,
    give_missing_gradients,
    plan_buckets,
    tensor_spec,
)
from paceline.parallel.ranks.pending import collective_error
from paceline.parallel.reducer.backward_pass import (
    OUTSIDE_BACKWARD,
    SynchronizationStats,
    current_pass,
)
from paceline.parallel.reducer.changes import Changes, describe_change
from paceline.parallel.reducer.contract import DataParallelContainer
from paceline.parallel.reducer.gradient_bucket import GradientBucket
from paceline.parallel.reducer.gradient_norm import LocalGradients
from paceline.parallel.reducer.module_checks import (
    persistent_buffers,
    require_supported,
    resolve_group,
    tensors_in,
)
from paceline.parallel.reducer.same_model import (
    broadcast_tensors,
    describe_model,
    require_same_model,
)
from paceline.parallel.reducer.settings import LaunchPolicy, Settings
from paceline.parallel.reducer.synchronizer import GradientSynchronizer


class DataParallel(DataParallelContainer):
    """A module whose gradients are averaged over the ranks of a group.

    Args:
        module: The model, on its final device and in its final dtype. All ranks get the values
            that the group's first rank has, frozen parameters and buffers included.
        cap_bytes: Largest bucket; None for one per dtype, zero for one per parameter.
        launch: When communication starts.
        process_group: The ranks to average over, as a group or a mesh of one dimension; all by
            default.
        reduction_dtype: What gradients are summed and sent in: float32 for bf16 or fp16 gradients
            whose sum must not lose digits, bfloat16 to send half the bytes of fp32 ones. By default
            each in its own.
        broadcast_buffers: Whether the persistent buffers (statistics of batch norm, for example)
            follow the first rank's before every training forward pass. Others, which are not part
            of the state dictionary, are taken over once.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        cap_bytes: float | None,
        launch: LaunchPolicy,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        reduction_dtype: torch.dtype | None = None,
        broadcast_buffers: bool = True,
    ) -> None:
        super().__init__(module, resolve_group(process_group), require_supported(module))
        if reduction_dtype is not None and not reduction_dtype.is_floating_point:
            raise UsageError(
                f"reduction_dtype must be a floating-point dtype, got {reduction_dtype}"
            )
        self._cap_bytes = cap_bytes
        self._settings = Settings(
            group_reference=self._group_reference,
            device=self._device,
            launch=launch,
            reduction_dtype=reduction_dtype,
        )
        self._built: _Trained = []
        """What is divided into buckets now."""
        self._agreed: _Trained = []
        """What all ranks were last seen to have."""
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
            self._build()
            if broadcast_buffers:
                self._state_buffers = list(persistent_buffers(module))

    @property
    def _synchronizes(self) -> bool:
        """Whether gradients pass through this container at all."""
        return self.is_distributed

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Runs the module.

        Args:
            arguments: As the module takes them.
            keywords: As the module takes them.
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
        """Makes sure that gradients are averaged; does nothing where they are already.

        Backward does this by itself. A rank whose training pass completed no gradient, or that
        left out backward, takes part here with none of its own.
        """
        if self._synchronizer is None:
            return
        if self._sync_state.forward_is_pending and not self._synchronizer.in_backward:
            self._synchronizer.take_part(self._synchronizer.begin(average=True))
        self._synchronizer.send_rest()
        self._synchronizer.receive_rest()

    def synchronization_stats(self) -> SynchronizationStats | None:
        """Returns sizes and times of the last synchronisation on this rank.

        None before it, and where nobody has asked to `record_statistics` before.
        """
        return None if self._synchronizer is None else self._synchronizer.stats()

    def message_bytes(self) -> list[int]:
        """Returns the size of each message of gradients in the last synchronisation."""
        return [] if self._synchronizer is None else self._synchronizer.message_bytes()

    def _arrived(self) -> dict[str, bool]:
        if self._synchronizer is None:
            return {}
        names = (name for name, _ in self._trained())
        return dict(zip(names, map(bool, self._synchronizer.arrived), strict=True))

    def _local_gradients(self) -> LocalGradients:
        gradients = [parameter.grad for parameter in self.module.parameters()]
        return LocalGradients(replicated=[grad for grad in gradients if grad is not None])

    def _prepare(self) -> GradientSynchronizer:
        """Gets ready for a pass whose gradients are recorded."""
        assert self._synchronizer is not None
        sync_state = self._sync_state
        sync_state.forward_synchronizes = sync_state.synchronize
        if current_pass() != OUTSIDE_BACKWARD:
            return self._synchronizer  # A checkpoint computes this pass a second time.
        self._synchronizer.forget_broken_pass()
        if sync_state.synchronize:
            # Evaluation may be one rank's own affair, so that it must not communicate.
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
        """Starts anew where parameters were frozen, unfrozen or replaced since the last pass.

        Args:
            agree: Whether all ranks are here to compare their models. If not, they do so when
                backward completes a gradient that is to be averaged.
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

    def _settle(self) -> None:
        """Ends a pass whose sums are here."""
        give_missing_gradients(self._replicated_buckets)

    def _require_same_model(self) -> None:
        settings = self._settings
        require_same_model(self.module, self._describe_settings(), settings.group, settings.device)

    def _describe_settings(self) -> str:
        """Says what must be the same on all ranks, beside the model."""
        settings = self._settings
        return (
            f"bucket cap {self._cap_bytes}, {settings.launch.name}, "
            f"reduction_dtype {settings.reduction_dtype}"
        )

    def _build(self) -> None:
        """Divides the parameters that are trained now, and watches them."""
        if self._synchronizer is not None:
            self._synchronizer.close()
            # Before the new buffers are made, the old ones can go.
            self._synchronizer, self._replicated_buckets = None, []
        self._num_builds += 1
        self._built = _trained_now(self.module)
        trained = self._trained()
        names = [name for name, _ in trained]
        parameters = [parameter for _, parameter in trained]
        plans = plan_buckets([tensor_spec(*named) for named in trained], self._cap_bytes)
        self._synchronizer = GradientSynchronizer(
            names,
            parameters,
            self._make_buckets(plans, parameters, names),
            settings=self._settings,
            sync_state=self._sync_state,
        )
        self._synchronizer.before_run = _while_alive(self._agree_in_backward)
        self._synchronizer.after_run = _while_alive(self._settle)

    def _make_buckets(
        self, plans: list[BucketPlan], parameters: list[nn.Parameter], names: list[str]
    ) -> Sequence[GradientBucket]:
        """Makes what gradients are collected in."""
        dtype = self._settings.reduction_dtype
        self._replicated_buckets = [Bucket(plan, parameters, names, dtype) for plan in plans]
        return self._replicated_buckets

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [named for named in self.module.named_parameters() if named[1].requires_grad]


_Trained: TypeAlias = list[tuple[nn.Parameter, bool]]
"""All parameters, and whether each is trained."""


def _trained_now(module: nn.Module) -> _Trained:
    return [(parameter, parameter.requires_grad) for parameter in module.parameters()]


def _is_same(one: _Trained, other: _Trained) -> bool:
    return len(one) == len(other) and all(
        parameter is known and is_trained == was_trained
        for (parameter, is_trained), (known, was_trained) in zip(one, other, strict=True)
    )


def _while_alive(method: Callable[[], None]) -> Callable[[], None]:
    """Returns a function that calls a method of an object without keeping the object alive."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        if (alive := reference()) is not None:
            alive()

    return call


def bucket_cap_bytes(size_mb: float | None) -> float | None:
    """Returns a bucket size in bytes, or says what it may be."""
    if size_mb is None:
        return None
    if not (isinstance(size_mb, (int, float)) and size_mb > 0):
        raise UsageError(
            f'bucket_size_mb must be a positive number, None, or "auto" where gradients are '
            f"averaged in buckets; got {size_mb!r}"
        )
    return size_mb * MIB
