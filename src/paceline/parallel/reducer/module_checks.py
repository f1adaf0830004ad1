"""Checks of modules and groups, and helpers that inspect modules and their outputs."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import UninitializedParameter

from paceline.core.errors import UsageError


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
