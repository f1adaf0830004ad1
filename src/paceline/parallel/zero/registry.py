"""Registry that connects a container's sharded parameters with the optimizer that updates them.

The container knows when a bucket's gradients have arrived, the optimizer how to step. They hold
only weak references to each other. Parameters are looked up by identity, so an optimizer needs
nothing but the parameters.

Hooks that make each layer wait for its own parameters before it reads them.

Most modules read their own parameters when they are called. Some parameters are read by other
modules: a list of parameters is never called, and attention may use the matrix of a projection
without calling it. The first forward pass, when nothing is in flight, records which modules are
called. The closest enclosing module that is called waits for the parameters of modules that are
not.

The module's hooks reference the container weakly, and their copies do nothing: a copy of the module
is not part of the container, and the module may outlive the container.
"""

import gc
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from paceline.core.errors import UsageError
from paceline.parallel.backward_pass import GroupReference
from paceline.parallel.ranks.device_clock import Moment
from paceline.parallel.zero.bucket import UsedParameters
from paceline.parallel.zero.flat_parameters import FlatParameters

_known: MutableMapping[Tensor, "weakref.ref[ShardedParameters]"] = WeakIdKeyDictionary()


class ShardedParameters:
    """The flat parameters of one container, one object per bucket.

    Args:
        flats: The flat parameters, in the order in which the next forward pass needs them.
        group: The ranks that hold the shards.
        used: Tracks which parameters had a gradient on any rank.
    """

    def __init__(
        self, flats: Sequence[FlatParameters], group: GroupReference, used: UsedParameters
    ) -> None:
        self.flats = flats
        self.group = group
        self._used = used
        self._find_optimizer: Callable[[], Optimizer | None] = lambda: None
        for flat in flats:
            for parameter in flat.parameters:
                _known[parameter] = weakref.ref(self)

    @property
    def has_optimizer(self) -> bool:
        """Whether an optimizer is attached and alive."""
        return self._find_optimizer() is not None

    def attach(self, optimizer: Optimizer) -> None:
        """Registers the optimizer that updates this rank's shards."""
        if self._find_optimizer() not in (None, optimizer):
            gc.collect()  # The old optimizer may be unreachable, but held by a reference cycle.
        if self._find_optimizer() not in (None, optimizer):
            raise UsageError(
                "the parameters of a ShardedDataParallel already belong to another "
                "ShardedOptimizer; give one optimizer several groups instead"
            )
        self._find_optimizer = weakref.ref(optimizer)

    def decide_gradients(self) -> None:
        """Sets the gradient of undecided shards that had one on any rank.

        Waits for the device only if there are undecided shards.
        """
        self._used.decide_gradients(self.flats)

    def zero_gradients(self, *, set_to_none: bool) -> None:
        """Clears the gradients of all shards."""
        if set_to_none:
            self._used.forget()
        else:
            self.decide_gradients()
        for flat in self.flats:
            flat.zero_gradients(set_to_none=set_to_none)

    @property
    def are_in_flight(self) -> bool:
        """Whether a reader of some parameter has to wait."""
        return any(flat.is_in_flight for flat in self.flats)

    def take_waits(self) -> list[tuple[Moment, Moment]]:
        """Returns and clears the recorded waits of readers for parameters."""
        waits = [moments for flat in self.flats for moments in flat.arriving.waits]
        for flat in self.flats:
            flat.arriving.waits.clear()
        return waits

    def time_waits(self) -> None:
        """Turns on timing of the readers' waits."""
        for flat in self.flats:
            flat.arriving.is_timed = True

    def wait(self) -> None:
        """Waits until all parameters have their new values."""
        for flat in self.flats:
            flat.wait()


def find_sharded_parameters(parameter: nn.Parameter) -> ShardedParameters | None:
    """Returns the sharded parameters that contain a parameter; None if it is not sharded."""
    reference: Any = _known.get(parameter)
    return None if reference is None else reference()


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
