"""Hooks that make each layer wait for its own parameters before it reads them.

Most modules read their own parameters when they are called. Some parameters are read by other
modules: a list of parameters is never called, and attention may use the matrix of a projection
without calling it. The first forward pass, when nothing is in flight, records which modules are
called. The closest enclosing module that is called waits for the parameters of modules that are
not.

The module's hooks reference the container weakly, and their copies do nothing: a copy of the module
is not part of the container, and the module may outlive the container.
"""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from paceline.parallel.zero.flat_parameters import FlatParameters
from paceline.parallel.zero.registry import ShardedParameters


class GatherHooks:
    """Waits for parameters before the module uses, saves or loads them.

    Args:
        root: The module.
        parameters: Its parameters, in flight between a step and the next forward pass.
    """

    def __init__(self, root: nn.Module, parameters: ShardedParameters) -> None:
        self._root = weakref.ref(root)
        self._parameters = parameters
        self._called: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._own: weakref.WeakKeyDictionary[nn.Module, list[FlatParameters]] = (
            weakref.WeakKeyDictionary()
        )
        self._needed: Mapping[nn.Module, list[FlatParameters]] | None = None
        """The parameters that each module waits for; None before the first forward pass."""
        flat_of = {parameter: flat for flat in parameters.flats for parameter in flat.parameters}
        for module in root.modules():
            flats = (flat_of[p] for p in module.parameters(recurse=False) if p in flat_of)
            self._own[module] = list(dict.fromkeys(flats))
            # Runs before other hooks, which may compute parameters from parameters.
            module.register_forward_pre_hook(_Hook(self, GatherHooks.before), prepend=True)
            # Submodules may also be saved and loaded separately.
            wait, refresh = (
                _Hook(self, action) for action in (GatherHooks.wait, GatherHooks.refresh)
            )
            module.register_state_dict_pre_hook(wait)  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(wait)  # type: ignore[no-untyped-call]
            module.register_load_state_dict_post_hook(refresh)  # type: ignore[no-untyped-call]

    def before(self, module: nn.Module) -> None:
        """Waits for the parameters of a module that is about to be called."""
        if self._needed is None:
            self._called.add(module)
            self._parameters.wait()
            return
        for flat in self._needed.get(module, ()):
            flat.wait()

    def wait(self, _module: nn.Module) -> None:
        """Waits for all parameters."""
        self._parameters.wait()

    def refresh(self, module: nn.Module) -> None:
        """Updates the master copies of a module's loaded parameters."""
        for flat in self._own.get(module, ()):
            flat.refresh_master()

    def learn(self) -> None:
        """Assigns parameters to waiting modules, after the first forward pass."""
        root = self._root()
        if self._needed is not None or root is None:
            return
        needed: weakref.WeakKeyDictionary[nn.Module, list[FlatParameters]] = (
            weakref.WeakKeyDictionary()
        )

        def visit(module: nn.Module, caller: nn.Module) -> None:
            if module in self._called:
                caller = module
            for reader in {module, caller}:
                known = needed.setdefault(reader, [])
                known += [flat for flat in self._own.get(module, ()) if flat not in known]
            for child in module.children():
                visit(child, caller)

        visit(root, root)
        self._needed = needed


class _Hook:
    """Calls a method of a weakly referenced object; copies of the hook do nothing."""

    def __init__(
        self, target: GatherHooks, action: Callable[[GatherHooks, nn.Module], None]
    ) -> None:
        self._target = weakref.ref(target)
        self._action = action

    def __call__(self, module: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return  # The container waits before it calls compiled code.
        if (target := self._target()) is not None:
            self._action(target, module)

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return _make_idle_hook, ()


def _make_idle_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: Any) -> None:
    pass
