"""Division of a module into layers, and the modules that use them.

Selection of layers: modules whose parameters are gathered before their forward, freed after it.

By default each element of an `nn.ModuleList` is a layer, and so is each other module with its own
parameters outside of these. A policy selects other modules, by class or one by one. torch modules
that read the parameters of their submodules, as attention reads its output projection's, always
form one layer with them.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from paceline.core.errors import UsageError
from paceline.parallel.fsdp.layer import Named, ShardedLayer
from paceline.parallel.fsdp.layout import lay_out
from paceline.parallel.fsdp.sharding import LayerParameter, Sharding
from paceline.parallel.fsdp.traffic import Traffic

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoundUser:
    """A module whose forward needs full parameters."""

    path: str
    module: nn.Module
    scope: list[nn.Module]
    """The modules whose own parameters it needs."""
    is_layer: bool
    """Whether it is a layer by the policy, or by default an element of an `nn.ModuleList`."""


def find_users(module: nn.Module, policy: WrapPolicy | None) -> Iterator[FoundUser]:
    """Yields the modules whose forward needs full parameters, with the owners of these."""
    if policy is not None:
        policy.require_match(module)
    yield from _find(module, "", set(), policy, is_element=False)


def _find(
    module: nn.Module,
    path: str,
    seen: set[nn.Module],
    policy: WrapPolicy | None,
    *,
    is_element: bool,
) -> Iterator[FoundUser]:
    if module in seen:
        return
    seen.add(module)
    has_forward = not isinstance(module, (nn.ModuleList, nn.ModuleDict))
    is_layer = is_element and has_forward if policy is None else policy.is_layer(module)
    if is_layer or isinstance(module, _READ_THEIR_CHILDREN):
        if any(True for _ in module.parameters()):
            seen.update(module.modules())
            yield FoundUser(
                path=path, module=module, scope=list(module.modules()), is_layer=is_layer
            )
        return
    # Lists of parameters are never called; their parent module reads them in its own forward.
    lists = [c for c in module.children() if isinstance(c, (nn.ParameterList, nn.ParameterDict))]
    scope = [module, *lists]
    if any(True for part in scope for _ in part.parameters(recurse=False)):
        yield FoundUser(path=path, module=module, scope=scope, is_layer=False)
    for name, child in module.named_children():
        if child not in lists:
            yield from _find(
                child,
                f"{path}.{name}" if path else name,
                seen,
                policy,
                is_element=isinstance(module, nn.ModuleList),
            )


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class LayerUser:
    """A module that needs full parameters while its forward runs."""

    name: str
    module: nn.Module
    scope: list[nn.Module]
    """The modules whose own parameters it needs."""
    layers: list[ShardedLayer]
    """Its own layers, and those of parameters that it shares with earlier modules."""
    places: list[tuple[nn.Module, str, LayerParameter]]
    """The module and attribute name of each of its parameters."""

    def show_full(self) -> None:
        """Sets the modules' attributes to the full parameters."""
        for module, name, parameter in self.places:
            setattr(module, name, parameter.full)

    def show_shards(self) -> None:
        """Sets the modules' attributes to the shards."""
        for module, name, parameter in self.places:
            setattr(module, name, parameter.shard)

    def require_shards(self) -> None:
        """Raises if a shard, or the memory of a shard, was replaced."""
        for module, name, parameter in self.places:
            if module._parameters.get(name) is not parameter.shard:
                raise UsageError(
                    f"parameter {parameter.name!r} was replaced after its container was created; "
                    "change its values in place, with copy_ or load_state_dict"
                )
            parameter.require_in_place()


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSettings:
    """Settings for the creation of a container's layers."""

    shared_out: Sharding
    replicated: Sharding
    device: torch.device
    compute_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    policy: WrapPolicy | None
    traffic: Traffic


@dataclasses.dataclass(frozen=True)
class _Kind:
    """The common properties of the parameters of one layer."""

    user: int | None
    """Index of the user; None for parameters that are not sharded, which share a layer."""
    dtype: torch.dtype
    is_plain: bool


def shard_module(
    module: nn.Module, settings: LayerSettings
) -> tuple[list[ShardedLayer], list[LayerUser]]:
    """Divides a module into layers, and replaces its parameters with shards.

    Shards get the values of the parameters, or zeros for parameters on the meta device.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    found = list(find_users(module, settings.policy))
    kinds: dict[nn.Parameter, _Kind] = {}
    for number, user in enumerate(found):
        for _, _, parameter in _occurrences(user):
            kinds.setdefault(parameter, _kind(number, user, parameter, settings.policy))
    by_kind: dict[_Kind, list[Named]] = defaultdict(list)
    for parameter, kind in kinds.items():
        by_kind[kind].append((names[parameter], parameter))
    homes: dict[nn.Parameter, tuple[ShardedLayer, LayerParameter]] = {}
    layers = []
    for kind, named in by_kind.items():
        layer = _make_layer(kind, named, settings)
        layers.append(layer)
        for position, (_, parameter) in enumerate(named):
            homes[parameter] = (layer, layer.parameters[position])
            if not parameter.is_meta:
                layer.take_values(position, parameter.detach())
    users = [
        LayerUser(
            name=user.path,
            module=user.module,
            scope=user.scope,
            layers=list(dict.fromkeys(homes[p][0] for _, _, p in _occurrences(user))),
            places=[(owner, name, homes[p][1]) for owner, name, p in _occurrences(user)],
        )
        for user in found
    ]
    for one in users:
        one.show_shards()
    _require_no_other_references(module, names)
    return layers, users


def _occurrences(user: FoundUser) -> list[tuple[nn.Module, str, nn.Parameter]]:
    return [
        (owner, name, parameter)
        for owner in user.scope
        for name, parameter in owner._parameters.items()
        if parameter is not None
    ]


def _kind(
    number: int, user: FoundUser, parameter: nn.Parameter, policy: WrapPolicy | None
) -> _Kind:
    is_rest = policy is not None and policy.rest == "replicated" and not user.is_layer
    # A zero-dimensional parameter has no rows to shard.
    if is_rest or parameter.dim() == 0:
        return _Kind(user=None, dtype=parameter.dtype, is_plain=is_rest)
    return _Kind(user=number, dtype=parameter.dtype, is_plain=False)


def _make_layer(kind: _Kind, named: list[Named], settings: LayerSettings) -> ShardedLayer:
    sharding = settings.replicated if kind.user is None else settings.shared_out
    layout = lay_out(
        [parameter for _, parameter in named], kind.dtype, settings.device, sharding.num_shards
    )
    return ShardedLayer(
        layout,
        named,
        sharding=sharding,
        compute_dtype=None if kind.is_plain else settings.compute_dtype,
        reduce_dtype=None if kind.is_plain else settings.reduce_dtype,
        is_plain=kind.is_plain,
        traffic=settings.traffic,
    )


def _require_no_other_references(module: nn.Module, names: dict[nn.Parameter, str]) -> None:
    """Raises if a module has another reference to a parameter, which would keep old values."""
    for path, owner in module.named_modules():
        for attribute, value in vars(owner).items():
            if attribute in ("_parameters", "_modules", "_buffers"):
                continue
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
