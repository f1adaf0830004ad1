"""Loading of saved state: full tensors, and DTensors on any mesh.

Initialisation of a module that was created on the meta device, one layer at a time.

No rank ever holds more than its shards and the layer being initialised: values are computed for one
layer, broadcast from the first rank, and sharded.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.core.errors import UsageError
from paceline.parallel.fsdp.layer import ShardedLayer
from paceline.parallel.fsdp.layers import LayerUser
from paceline.parallel.fsdp.sharding import LayerParameter, as_dtensor
from paceline.parallel.same_model import broadcast_tensors


class LoadsFullTensors:
    """Reduces loaded tensors to this rank's rows; full tensors need no communication.

    Args:
        module: The inner module, whose names the state uses.
        layers: The layers of its parameters.
    """

    def __init__(self, module: nn.Module, layers: Sequence[ShardedLayer]) -> None:
        self.are_values_missing = False
        """Whether the parameters have no values until a state is loaded."""
        homes = {p.shard: (layer, p) for layer in layers for p in layer.parameters}
        self._places = {
            name: homes[parameter]
            for name, parameter in module.named_parameters(remove_duplicate=False)
        }
        module.register_load_state_dict_pre_hook(self._cut)  # type: ignore[no-untyped-call]
        module.register_load_state_dict_post_hook(self._note)  # type: ignore[no-untyped-call]

    def require_values(self) -> None:
        """Raises if the parameters have no values yet."""
        if self.are_values_missing:
            raise UsageError(
                "the module was created on the meta device, and its parameters have no values "
                "yet; pass initialize=... to the container, or load a state dictionary"
            )

    def _note(self, _module: nn.Module, _incompatible: Any) -> None:
        self.are_values_missing = False

    def _cut(
        self,
        _module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        *_: object,
    ) -> None:
        if metadata.get("assign_to_params_buffers", False):
            raise UsageError(
                "load_state_dict(assign=True) would replace the parameters of the container; load "
                "without assign=True"
            )
        for name, (layer, parameter) in self._places.items():
            value = state.get(prefix + name)
            if isinstance(value, Tensor) and value.shape == parameter.full.shape:
                state[prefix + name] = _own_rows(value, layer, parameter)


def _own_rows(value: Tensor, layer: ShardedLayer, parameter: LayerParameter) -> Tensor:
    if isinstance(value, DTensor):
        spec = parameter.spec
        if spec is not None and (value.device_mesh, value.placements) == (
            spec.mesh,
            spec.placements,
        ):
            return value
        value = value.full_tensor()
    if parameter.spec is None:
        return value
    rows = value.detach()
    if rows.dim():
        rows = parameter.piece.own_rows(rows, layer.sharding.shard)
    return as_dtensor(rows, parameter.spec)


def is_on_meta(module: nn.Module) -> bool:
    """Returns whether a module's parameters are on the meta device; raises if only some are."""
    states = {parameter.is_meta: name for name, parameter in module.named_parameters()}
    if len(states) == 2:
        raise UsageError(
            f"parameter {states[True]!r} is on the meta device and {states[False]!r} is not; "
            "create the whole module there, or none of it"
        )
    return True in states


def default_device(group: dist.ProcessGroup) -> torch.device:
    """Returns the device that a group's ranks compute on."""
    if torch.device("cuda") in group._device_types and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def allocate_buffers(module: nn.Module, device: torch.device) -> list[str]:
    """Allocates memory for buffers on the meta device; returns their names."""
    allocated = []
    for path, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_meta:
                part._buffers[name] = torch.zeros_like(buffer, device=device)
                allocated.append(f"{path}.{name}" if path else name)
    return allocated


@torch.no_grad()
def initialize_layers(
    module: nn.Module,
    users: list[LayerUser],
    layers: list[ShardedLayer],
    initialize: Callable[[nn.Module], None],
    group: dist.ProcessGroup,
) -> None:
    """Calls a function with every module that has its own parameters or buffers.

    The module's parameters are full during the call. A parameter that several modules share keeps
    the value from the first call.
    """
    homes = {p: (layer, index) for layer in layers for index, p in enumerate(layer.parameters)}
    called: set[nn.Module] = set()
    for user in users:
        values = dict(_full_values(user))
        for owner, name, parameter in user.places:
            setattr(owner, name, values[parameter])
        for part in user.scope:
            if part not in called and (part._parameters or part._buffers):
                called.add(part)
                initialize(part)
        fresh = [parameter for parameter in values if parameter in homes]
        if fresh:
            broadcast_tensors([values[parameter] for parameter in fresh], group)
        for parameter in fresh:
            layer, index = homes.pop(parameter)
            layer.take_values(index, values[parameter])
        user.show_shards()
        del values
    for part in module.modules():
        if part not in called and part._buffers:
            initialize(part)


def _full_values(user: LayerUser) -> Iterator[tuple[LayerParameter, Tensor]]:
    for _, _, parameter in user.places:
        like = parameter.full
        full = torch.empty(like.shape, dtype=parameter.local.dtype, device=like.device)
        yield parameter, nn.Parameter(full, parameter.shard.requires_grad)
