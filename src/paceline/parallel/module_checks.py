"""Checks of modules and groups, and helpers that inspect modules and their outputs.

Hooks that run when a parameter's gradient is complete and hold only weak references.

A parameter holds its hooks in memory that Python's garbage collector does not traverse. If a hook
held a strong reference to the parameter's owner, neither would ever be freed.

Ownership of parameters: each has one owner, so its gradients are never averaged twice.
"""

import dataclasses
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import UninitializedParameter
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from paceline.core.errors import PacelineError, UsageError


def resolve_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    """Returns the process group itself, that of a one-dimensional mesh, or the default group."""
    if not dist.is_initialized():
        raise UsageError("there is no process group yet; create this inside distributed_session()")
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise UsageError(
            "this rank is not in the process group; create this only on ranks of the group"
        )
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise UsageError(f"a mesh of one dimension is needed, this one has {group.ndim}")
        return group.get_group()
    if group is None:
        group = dist.group.WORLD
    assert group is not None
    return group


def require_supported(module: nn.Module) -> torch.device:
    """Returns the device of all parameters; raises if they cannot be synchronised."""
    devices: dict[torch.device, str] = {}
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise UsageError(
                f"parameter {name!r} has no shape yet; run the model once before wrapping it"
            )
        if parameter.is_meta:
            raise UsageError(
                f"parameter {name!r} is on the meta device; give it values before wrapping it"
            )
        devices.setdefault(parameter.device, name)
    if not devices:
        raise UsageError("the module has no parameters, so there is nothing to synchronise")
    if len(devices) > 1:
        places = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise UsageError(
            f"a rank has one device, but the module has {places}; use one rank per device"
        )
    return next(iter(devices))


def is_compiled(module: nn.Module) -> bool:
    """Returns whether torch.compile has compiled a module, in place or as a wrapper."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers that are part of the module's state, by name."""
    kept = module.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in module.named_buffers() if name in kept}


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested tuples, lists, dictionaries and dataclasses."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from tensors_in(item)
    elif isinstance(output, dict):
        yield from tensors_in(list(output.values()))
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        yield from tensors_in([getattr(output, f.name) for f in dataclasses.fields(output)])


Owner = TypeVar("Owner")


class GradientTaker(Protocol):
    """An object that processes gradients, addressed by the index of their parameter."""

    def take(self, index: int) -> None:
        """Processes a complete gradient."""


def when_complete(
    parameter: Tensor, owner: Owner, tell: Callable[[Owner], None]
) -> RemovableHandle:
    """Calls ``tell(owner)`` after each gradient of a parameter, as long as the owner is alive."""
    reference = weakref.ref(owner)

    def hook(_parameter: Tensor) -> None:
        if (alive := reference()) is not None:
            tell(alive)

    return _register(parameter, hook)


def take_when_complete(parameter: Tensor, owner: GradientTaker, index: int) -> RemovableHandle:
    """Calls ``owner.take(index)`` after each gradient of a parameter, with minimal overhead."""
    reference = weakref.ref(owner)

    def hook(_parameter: Tensor) -> None:
        if (alive := reference()) is not None:
            alive.take(index)

    return _register(parameter, hook)


def _register(parameter: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return handle


_owners: MutableMapping[Tensor, "weakref.ref[Any]"] = WeakIdKeyDictionary()
"""The owner of each parameter; keys and values are weak references."""


class SynchronizationError(PacelineError):
    """Gradients could not be synchronised on this rank."""


def claim(parameters: Sequence[Tensor], names: Sequence[str], owner: object) -> None:
    """Makes an object the owner of parameters; raises if one of them has another owner.

    Args:
        parameters: The parameters; not kept alive.
        names: The parameters' names, for the error message.
        owner: The new owner; not kept alive.
    """
    for name, parameter in zip(names, parameters, strict=True):
        other = _owners.get(parameter)
        if other is not None and other() is not None:
            gc.collect()  # The old owner may be unreachable, but held by a reference cycle.
        if other is not None and other() is not None:
            raise SynchronizationError(
                f"parameter {name!r} already belongs to another data-parallel container; its "
                "gradients would be averaged twice"
            )
    for parameter in parameters:
        _owners[parameter] = weakref.ref(owner)


def release(parameters: Iterable[Tensor]) -> None:
    """Removes the owner of parameters."""
    for parameter in parameters:
        _owners.pop(parameter, None)
