"""Parameters, gradients and optimizer state sharded over ranks (ZeRO-3).

Phases of a training step on every rank, with the default prefetch of two layers:

1. Before a layer's forward, its parameters are all-gathered, and those of the next two layers are
   prefetched. After its forward, they are freed, except the last layer's, which backward needs
   first. The order of layers is known from the previous forward pass.
2. The gradient of a layer's output arrives: its parameters are all-gathered again, and those of the
   two layers before it are prefetched.
3. Backward has passed a layer: its parameters are freed, its gradients are reduce-scattered, and
   the reduce-scatter of the layer that was sent before it is waited for.
4. Backward is over: the last gradients are waited for, and the means are added to the shards'
   gradients.

All ranks must run the same layers in the same order, and the same number of backward passes. Sends
in backward follow the order of the forward pass, even for layers that the loss does not depend on,
so ranks whose losses depend on different parameters still send the same messages. Layers that a
reentrant checkpoint recomputes are sent in phase 4.

`WrapPolicy` defines the layers. A layer's full parameters exist only while its own forward runs:
other modules must call it instead of reading its parameters, and the loss may depend on it only
through its outputs. A reentrant checkpoint frees its layers only after backward. A pass with
``create_graph=True`` frees no layers until the backward pass that follows it; a forward pass in
between gathers them again.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from paceline.core.errors import UsageError
from paceline.parallel.contract import (
    DataParallelContainer,
    LocalGradients,
    is_compiled,
    require_supported,
)
from paceline.parallel.dtensor import local_tensor
from paceline.parallel.fsdp.layers import (
    LoadsFullTensors,
    WrapPolicy,
    allocate_buffers,
    default_device,
    initialize_layers,
    is_on_meta,
    shard_module,
)
from paceline.parallel.fsdp.schedule import Schedule
from paceline.parallel.fsdp.sharding import resolve_sharding
from paceline.parallel.ranks.collectives import resolve_group
from paceline.parallel.reducer import OUTSIDE_BACKWARD, current_pass
from paceline.parallel.same_model import (
    Changes,
    broadcast_tensors,
    describe_change,
    describe_model,
    require_same_model,
)
from paceline.parallel.traffic import SynchronizationStats, Traffic


class FullyShardedDataParallel(DataParallelContainer):
    """A module whose parameters, gradients and optimizer state are sharded over ranks (ZeRO-3).

    Its parameters are DTensors with their full shapes, of which this rank holds some rows. They
    work with any elementwise optimizer. Zero-dimensional parameters are replicated. Create the
    optimizer after the container.

    Args:
        module: The model, on its final device and in its final dtype. All ranks receive the values
            of the group's first rank, including frozen parameters and buffers. For a model on the
            meta device no rank ever holds more than its shards and one layer; values come from
            `initialize` or from `load_state_dict`.
        compute_dtype: The dtype of full parameters, their gradients and floating-point inputs; by
            default parameters and inputs keep their own. Shards and their gradients stay in the
            parameters' own dtype.
        reduce_dtype: The dtype in which gradients are sent; by default that in which they are
            computed, but float32 instead of float16, whose largest number is 65,504: a few large
            gradients add up to more. CPU ranks sum in the wider of `reduce_dtype` and the
            parameters' own dtype, NCCL in `reduce_dtype`.
        output_dtype: The dtype to which floating-point outputs are cast; no cast by default.
        process_group: The ranks to shard over, as a group or a one-dimensional mesh; by default all
            ranks. On a two-dimensional mesh, replicate x shard, gradients are averaged over all
            ranks, and parameters are sharded only along the second dimension.
        wrap: Selects the layers; elements of `nn.ModuleList` by default.
        reshard_after_forward: Whether full parameters are freed between forward and backward.
            Otherwise they are gathered once per step, and all are in memory when forward ends.
        prefetch: Number of layers that are gathered ahead.
        initialize: Initialises a module's own parameters and buffers, for a model on the meta
            device. It is called with each module that has any, with full parameters.
        device: The final device for a model on the meta device; by default the group's device.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        compute_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        output_dtype: torch.dtype | None = None,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        wrap: WrapPolicy | None = None,
        reshard_after_forward: bool = True,
        prefetch: int = 2,
        initialize: Callable[[nn.Module], None] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        dtypes = {
            "compute_dtype": compute_dtype,
            "reduce_dtype": reduce_dtype,
            "output_dtype": output_dtype,
        }
        for name, dtype in dtypes.items():
            if dtype is not None and not dtype.is_floating_point:
                raise UsageError(f"{name} must be a floating-point dtype, got {dtype}")
        if prefetch < 0:
            raise UsageError(f"prefetch must not be negative, got {prefetch}")
        on_meta = is_on_meta(module)
        if on_meta:
            where = process_group if isinstance(process_group, dist.ProcessGroup) else None
            own_device = torch.device(device or default_device(resolve_group(where)))
        else:
            own_device = require_supported(module)
        _require_shardable(module)
        group, sharded, replicated = resolve_sharding(process_group, own_device)
        super().__init__(module, group, own_device)
        assert sharded.shard_group is not None
        self._shard_group = sharded.shard_group
        self._compute_dtype = compute_dtype
        self._output_dtype = output_dtype
        self._description = (
            f"compute_dtype {compute_dtype}, reduce_dtype {reduce_dtype}, prefetch {prefetch}"
        )
        require_same_model(module, self._description, group, own_device)
        self._changes = Changes(self._group_reference, own_device)
        if not on_meta:
            broadcast_tensors([*module.parameters(), *module.buffers()], group)
        self._traffic = Traffic(own_device)
        self._layers, users = shard_module(
            module,
            wrap,
            sharded=sharded,
            replicated=replicated,
            device=own_device,
            compute_dtype=compute_dtype,
            reduce_dtype=reduce_dtype,
            traffic=self._traffic,
        )
        self._agreed = self._trained_now()
        """Whether each parameter is trained, as all ranks last agreed."""
        self._loads = LoadsFullTensors(module, self._layers)
        if on_meta:
            self._loads.are_values_missing = initialize is None
            buffers = allocate_buffers(module, own_device)
            if initialize is not None:
                initialize_layers(module, users, self._layers, initialize, group)
                broadcast_tensors(module.buffers(), group)
            elif missing := [name for name in buffers if name not in module.state_dict()]:
                raise UsageError(
                    f"buffer {missing[0]!r} is on the meta device and in no checkpoint; pass "
                    "initialize=..., which gives it values"
                )
        self._schedule = Schedule(
            users,
            self._layers,
            sync_state=self._sync_state,
            traffic=self._traffic,
            layers_ahead=prefetch,
            reshard_after_forward=reshard_after_forward,
            is_distributed=self.is_distributed,
        )

    @_disable_dynamo(recursive=False)
    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Runs the module.

        Args:
            arguments: Positional arguments of the module.
            keywords: Keyword arguments of the module.
        """
        if self._compute_dtype is not None:
            arguments, keywords = _cast((arguments, keywords), self._compute_dtype)
        if current_pass() != OUTSIDE_BACKWARD:
            return _cast(self.module(*arguments, **keywords), self._output_dtype)
        self._loads.require_values()
        if self.is_distributed and torch.is_grad_enabled():
            self._follow_changes()
        self._schedule.begin_forward()
        try:
            output = self.module(*arguments, **keywords)
        except BaseException as error:
            self._schedule.break_forward()
            if isinstance(error, RuntimeError) and (known := _explain_mixed(error, self.module)):
                raise known from error
            raise
        self._schedule.end_forward()
        return _cast(output, self._output_dtype)

    def _trained_now(self) -> list[bool]:
        return [p.shard.requires_grad for layer in self._layers for p in layer.parameters]

    def _follow_changes(self) -> None:
        """Ensures that all ranks have frozen and unfrozen the same parameters.

        A rank that has frozen a whole layer does not send its message, so others would hang.
        """
        current = self._trained_now()
        if current == self._agreed:
            return
        parameters = [parameter for layer in self._layers for parameter in layer.parameters]
        shards = [parameter.shard for parameter in parameters]
        change = describe_change(
            [parameter.name for parameter in parameters],
            list(zip(shards, self._agreed, strict=True)),
            list(zip(shards, current, strict=True)),
        )
        if not self._changes.agree(change, describe_model(self.module, self._description)):
            require_same_model(self.module, self._description, self.process_group, self._device)
        self._agreed = current

    def finish_gradient_synchronization(self) -> None:
        """Does nothing: gradients are averaged when backward returns."""

    def synchronization_stats(self) -> SynchronizationStats | None:
        """Returns message sizes and times of the last synchronisation on this rank.

        Returns None before the first synchronisation, and if `record_statistics` was not on for it.
        A bucket is a layer's gradient message, in sending order. Exposed communication includes all
        waits of the step, also those for parameters in forward.
        """
        return self._traffic.stats()

    def message_bytes(self) -> list[int]:
        """Returns the size of each layer's gradient message in the last synchronisation."""
        return self._traffic.message_bytes()

    def _arrived(self) -> dict[str, bool]:
        return self._schedule.arrived

    def full_state_dict(self) -> dict[str, Tensor]:
        """Returns the module's state as full plain tensors, by name; all ranks must call it."""
        gathered: dict[nn.Parameter, Tensor] = {}
        for layer in self._layers:
            gathered |= layer.gather_full()
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        return {
            name: gathered[parameters[name]] if name in parameters else value
            for name, value in self.state_dict().items()
        }

    def _local_gradients(self) -> LocalGradients:
        replicated: list[Tensor] = []
        sharded: list[Tensor] = []
        for layer in self._layers:
            for parameter in layer.parameters:
                if parameter.shard.grad is not None:
                    own = local_tensor(parameter.shard.grad)
                    target = replicated if layer.sharding.shard_group is None else sharded
                    if own.numel():
                        target.append(own)
        return LocalGradients(
            replicated=replicated, sharded=sharded, shard_group=self._shard_group.get()
        )


def _cast(values: Any, dtype: torch.dtype | None) -> Any:
    """Casts the floating-point tensors in nested containers."""
    if dtype is None:
        return values

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return tree_map_only(Tensor, cast, values)


def _require_shardable(module: nn.Module) -> None:
    """Raises if a module has parameters or compiled parts that cannot be sharded."""
    for name, parameter in module.named_parameters():
        if not parameter.is_floating_point():
            raise UsageError(
                f"parameter {name!r} is {parameter.dtype}; only real floating-point parameters can "
                "be fully sharded: use another container, or make it a buffer"
            )
    for name, part in module.named_modules():
        if is_compiled(part):
            raise UsageError(
                f"module {name or type(part).__name__!r} is compiled, which would keep freed "
                "parameters in its graph; wrap it uncompiled"
            )


_MIXED = "mixed torch.Tensor and DTensor"


def _explain_mixed(error: RuntimeError, module: nn.Module) -> UsageError | None:
    """Returns an error that names the module that read a shard; None for other errors."""
    if _MIXED not in str(error):
        return None
    names = {part: name for name, part in module.named_modules()}
    reader = _innermost(error.__traceback__, names)
    return UsageError(
        f"module {reader!r} reads parameters of another module, which are gathered only during "
        "the other module's forward; call that module, or make both one layer: "
        "wrap=WrapPolicy(classes=...)"
    )


def _innermost(traceback: TracebackType | None, names: dict[nn.Module, str]) -> str:
    """Returns the name of the innermost of these modules in a traceback."""
    found = ""
    while traceback is not None:
        owner = traceback.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and owner in names:
            found = names[owner] or type(owner).__name__
        traceback = traceback.tb_next
    return found
