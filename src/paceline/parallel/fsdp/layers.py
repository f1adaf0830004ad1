"""The layers of a module: how they are found, sharded, initialised and loaded.

Layers are modules whose parameters are gathered before their forward and freed after it. By default
each element of an `nn.ModuleList` is a layer, and so is each other module with its own parameters
outside of these. A policy selects other modules, by class or one by one. torch modules that read
the parameters of their submodules, as attention reads its output projection's, always form one
layer with them.

A module that was created on the meta device is initialised one layer at a time: values are computed
for one layer, broadcast from the first rank, and sharded, so no rank ever holds more than its
shards and that layer. A saved state may consist of full tensors, or of DTensors on any mesh.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from paceline.core.errors import UsageError
from paceline.devices import accelerator
from paceline.parallel.dtensor import as_dtensor
from paceline.parallel.fsdp.layer import LayerParameter, Named, ShardedLayer
from paceline.parallel.fsdp.sharding import Sharding, lay_out
from paceline.parallel.same_model import broadcast_tensors
from paceline.parallel.traffic import Traffic

_READ_THEIR_CHILDREN = (
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WrapPolicy:
    """The choice of layers, and the treatment of parameters outside of them."""

    classes: tuple[type[nn.Module], ...] = ()
    """Each module of one of these classes is a layer, including its submodules."""
    modules: tuple[nn.Module, ...] = ()
    """Further modules that are layers."""
    rest: Literal["sharded", "replicated"] = "sharded"
    """Treatment of parameters outside of layers: sharded, with a separate layer per module; or
    replicated, as plain tensors in their own dtype whose gradients are all-reduced."""

    def is_layer(self, module: nn.Module) -> bool:
        """Returns whether a module is a layer, including its submodules.

        Args:
            module: Any module of the model.
        """
        return isinstance(module, self.classes) or any(module is one for one in self.modules)

    def require_match(self, module: nn.Module) -> None:
        """Raises if the policy matches no module, since sharding would differ from the intent.

        Args:
            module: The whole model.
        """
        if not any(self.is_layer(part) for part in module.modules()):
            names = [one.__name__ for one in self.classes] or "the given modules"
            raise UsageError(
                f"the module has none of {names}; name classes or modules that it contains"
            )


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class LayerUser:
    """A module that needs full parameters while its forward runs."""

    name: str
    module: nn.Module
    scope: list[nn.Module]
    """The modules whose own parameters it needs."""
    is_layer: bool
    """Whether it is a layer by the policy, or by default an element of an `nn.ModuleList`."""
    layers: list[ShardedLayer] = dataclasses.field(default_factory=list)
    """Its own layers, and those of parameters that it shares with earlier modules."""
    attributes: list[tuple[nn.Module, str, LayerParameter]] = dataclasses.field(
        default_factory=list
    )
    """The module and attribute name of each of its parameters."""

    def show_full(self) -> None:
        """Sets the modules' attributes to the full parameters."""
        for module, name, parameter in self.attributes:
            _set_parameter(module, name, parameter.full)

    def show_shards(self) -> None:
        """Sets the modules' attributes to the shards."""
        for module, name, parameter in self.attributes:
            _set_parameter(module, name, parameter.shard)

    def require_shards(self) -> None:
        """Raises if a shard, or the memory of a shard, was replaced."""
        for module, name, parameter in self.attributes:
            if module._parameters.get(name) is not parameter.shard:
                raise UsageError(
                    f"parameter {parameter.name!r} was replaced after its container was created; "
                    "change its values in place, with copy_ or load_state_dict"
                )
            parameter.require_in_place()


def _set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Sets a parameter that the module already has, which happens twice in each forward call."""
    # A module's own `__setattr__` checks much that cannot have changed. A class that has another,
    # such as an LSTM, must see the new tensor.
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[name] = parameter
    else:
        setattr(module, name, parameter)


@dataclasses.dataclass(frozen=True)
class _Kind:
    """The common properties of the parameters of one layer."""

    user: int | None
    """Index of the user; None for parameters that are not sharded, which share a layer."""
    dtype: torch.dtype
    is_plain: bool


def shard_module(
    module: nn.Module,
    policy: WrapPolicy | None,
    *,
    sharded: Sharding,
    replicated: Sharding,
    device: torch.device,
    compute_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    traffic: Traffic,
) -> tuple[list[ShardedLayer], list[LayerUser]]:
    """Divides a module into layers, and replaces its parameters with shards.

    Shards get the values of the parameters, or zeros for parameters on the meta device.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    if policy is not None:
        policy.require_match(module)
    users = list(_find_users(module, "", set(), policy, is_element=False))
    kinds: dict[nn.Parameter, _Kind] = {}
    for number, user in enumerate(users):
        for _, _, parameter in _occurrences(user):
            kinds.setdefault(parameter, _kind(number, user, parameter, policy))
    by_kind: dict[_Kind, list[Named]] = defaultdict(list)
    for parameter, kind in kinds.items():
        by_kind[kind].append((names[parameter], parameter))
    homes: dict[nn.Parameter, tuple[ShardedLayer, LayerParameter]] = {}
    layers = []
    for kind, named in by_kind.items():
        sharding = replicated if kind.user is None else sharded
        parameters = [parameter for _, parameter in named]
        layer = ShardedLayer(
            lay_out(parameters, kind.dtype, device, sharding.num_shards),
            named,
            sharding=sharding,
            compute_dtype=None if kind.is_plain else compute_dtype,
            reduce_dtype=None if kind.is_plain else reduce_dtype,
            is_plain=kind.is_plain,
            traffic=traffic,
        )
        layers.append(layer)
        for position, parameter in enumerate(parameters):
            homes[parameter] = (layer, layer.parameters[position])
            if not parameter.is_meta:
                layer.take_values(position, parameter.detach())
    for user in users:
        occurrences = _occurrences(user)
        user.layers.extend(dict.fromkeys(homes[p][0] for _, _, p in occurrences))
        user.attributes.extend((owner, name, homes[p][1]) for owner, name, p in occurrences)
    for user in users:
        user.show_shards()
    _require_no_other_references(module, names)
    return layers, users


def _find_users(
    module: nn.Module,
    path: str,
    seen: set[nn.Module],
    policy: WrapPolicy | None,
    *,
    is_element: bool,
) -> Iterator[LayerUser]:
    """Yields the modules whose forward needs full parameters, with the owners of these."""
    if module in seen:
        return
    seen.add(module)
    has_forward = not isinstance(module, (nn.ModuleList, nn.ModuleDict))
    is_layer = is_element and has_forward if policy is None else policy.is_layer(module)
    if is_layer or isinstance(module, _READ_THEIR_CHILDREN):
        if any(True for _ in module.parameters()):
            seen.update(module.modules())
            yield LayerUser(
                name=path, module=module, scope=list(module.modules()), is_layer=is_layer
            )
        return
    # Lists of parameters are never called; their parent module reads them in its own forward.
    lists = [c for c in module.children() if isinstance(c, (nn.ParameterList, nn.ParameterDict))]
    scope = [module, *(part for each in lists for part in each.modules())]
    if any(True for part in scope for _ in part.parameters(recurse=False)):
        yield LayerUser(name=path, module=module, scope=scope, is_layer=False)
    for name, child in module.named_children():
        if child not in lists:
            yield from _find_users(
                child,
                f"{path}.{name}" if path else name,
                seen,
                policy,
                is_element=isinstance(module, nn.ModuleList),
            )


def _occurrences(user: LayerUser) -> list[tuple[nn.Module, str, nn.Parameter]]:
    return [
        (owner, name, parameter)
        for owner in user.scope
        for name, parameter in owner._parameters.items()
        if parameter is not None
    ]


def _kind(
    number: int, user: LayerUser, parameter: nn.Parameter, policy: WrapPolicy | None
) -> _Kind:
    is_rest = policy is not None and policy.rest == "replicated" and not user.is_layer
    # A zero-dimensional parameter has no rows to shard.
    if is_rest or parameter.dim() == 0:
        return _Kind(user=None, dtype=parameter.dtype, is_plain=is_rest)
    return _Kind(user=number, dtype=parameter.dtype, is_plain=False)


def _require_no_other_references(module: nn.Module, names: dict[nn.Parameter, str]) -> None:
    """Raises if a module has another reference to a parameter, which would keep old values."""
    for path, owner in module.named_modules():
        for attribute, value in vars(owner).items():
            for leaf in _parameters_in(value):
                if leaf in names:
                    raise UsageError(
                        f"module {path or type(owner).__name__!r} keeps parameter "
                        f"{names[leaf]!r} in {attribute!r} too, where it would never be trained; "
                        "read it from the module's attribute, or keep it in an nn.ParameterList"
                    )


def _parameters_in(value: Any) -> Iterator[nn.Parameter]:
    if isinstance(value, (nn.Parameter, list, tuple, dict)):
        for leaf in tree_leaves(value):
            if isinstance(leaf, nn.Parameter):
                yield leaf


class LoadsFullTensors:
    """Reduces loaded tensors to this rank's rows; full tensors need no communication."""

    def __init__(self, module: nn.Module, layers: Sequence[ShardedLayer]) -> None:
        self.are_values_missing = False
        """Whether the parameters have no values until a state is loaded."""
        homes = {p.shard: (layer, p) for layer in layers for p in layer.parameters}
        self._homes = {
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
        for name, (layer, parameter) in self._homes.items():
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
    return accelerator.selected_device(group._device_types)


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
        for owner, name, parameter in user.attributes:
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
    for _, _, parameter in user.attributes:
        like = parameter.full
        full = torch.empty(like.shape, dtype=parameter.local.dtype, device=like.device)
        yield parameter, nn.Parameter(full, parameter.shard.requires_grad)
