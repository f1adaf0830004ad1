"""Selection of layers: modules whose parameters are gathered before their forward, freed after it.

By default each element of an `nn.ModuleList` is a layer, and so is each other module with its own
parameters outside of these. A policy selects other modules, by class or one by one. torch modules
that read the parameters of their submodules, as attention reads its output projection's, always
form one layer with them.
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
