"""Which modules are layers: gathered before their forward, freed after it.

By default a layer is an element of an `nn.ModuleList`; outside of these, each module that has
parameters of its own. A policy names others, by class or one by one. Modules of torch's that read
the parameters of modules inside of them, as attention reads its output projection's, are always one
layer with these.
"""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from torch import nn

from paceline.core.errors import UsageError

_READ_THEIR_CHILDREN = (
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WrapPolicy:
    """What is gathered together, and what becomes of the parameters outside."""

    classes: tuple[type[nn.Module], ...] = ()
    """Each module of one of these is a layer, with all that is inside of it."""
    modules: tuple[nn.Module, ...] = ()
    """Modules that are layers as well."""
    rest: Literal["sharded", "replicated"] = "sharded"
    """Parameters outside of layers: sharded, each module's as a layer of its own; or whole on every
    rank, as plain tensors in their own dtype whose gradients are all-reduced."""

    def is_layer(self, module: nn.Module) -> bool:
        """Whether a module is one layer with all that is inside of it.

        Args:
            module: Any module of the model.
        """
        return isinstance(module, self.classes) or any(module is one for one in self.modules)

    def require_match(self, module: nn.Module) -> None:
        """Refuses a policy that finds nothing, which would shard otherwise than meant.

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
    """Whether the policy has named it."""


def find_users(module: nn.Module, policy: WrapPolicy | None) -> Iterator[FoundUser]:
    """Yields the modules whose forward needs full parameters, and where these are found."""
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
    # Lists of parameters are never called; whoever has one reads it in its own forward.
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
