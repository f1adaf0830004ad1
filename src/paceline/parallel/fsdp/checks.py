"""Checks of fully sharded containers, with errors that name the cause and the remedy."""

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.core.errors import UsageError
from paceline.parallel.reducer.module_checks import is_compiled

if TYPE_CHECKING:
    from paceline.parallel.fsdp.layers import LayerUser

_MIXED = "mixed torch.Tensor and DTensor"


def require_dtypes(**dtypes: torch.dtype | None) -> None:
    """Raises if an option is not a floating-point dtype."""
    for name, dtype in dtypes.items():
        if dtype is not None and not dtype.is_floating_point:
            raise UsageError(f"{name} must be a floating-point dtype, got {dtype}")


def require_shardable(module: nn.Module) -> None:
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


def require_watchable(user: "LayerUser", output: Any, tensors: Sequence[Tensor]) -> None:
    """Raises if an output needs the layer after it is freed: no tensor found, or a view of it."""
    if output is not None and not tensors and torch.is_grad_enabled():
        raise UsageError(
            f"layer {user.name!r} returns a {type(output).__name__}, in which no tensor was found "
            "whose gradient would tell that backward needs the layer; return tensors in tuples, "
            "lists, dictionaries or dataclasses"
        )
    storages = {pointer for layer in user.layers for pointer in layer.addresses()} - {0}
    for tensor in tensors:
        if tensor.layout == torch.strided and tensor.untyped_storage().data_ptr() in storages:
            raise UsageError(
                f"layer {user.name!r} returns a view of its own parameters, whose memory is freed "
                "when its forward ends; return a copy: .clone()"
            )


def explain_mixed(error: RuntimeError, module: nn.Module) -> UsageError | None:
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
