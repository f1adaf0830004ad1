"""Placeholder for a gradient that was reduce-scattered.

A rank holds only its own shard of such a gradient. If the parameter's gradient were None, the norm
over all gradients would be 0, and a plain optimizer would silently do nothing. The placeholder is a
tensor without memory that raises when used, with an error that names the alternatives.
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from paceline.core.errors import UsageError

_aten = torch.ops.aten

_CHANGES_NOTHING = frozenset({_aten.zero_.default, _aten.detach.default, _aten.alias.default})


class ReducedGradient(Tensor):
    """A gradient whose elements are on the ranks that own them.

    Args:
        parameter: The parameter of the gradient.
        name: The parameter's name, for error messages.
    """

    parameter_name: str
    received: Tensor | None
    """The gradient that later backward passes have added, for the next message."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type[Self], parameter: Tensor, name: str) -> Self:  # noqa: D102
        made: Self = Tensor._make_wrapper_subclass(
            cls,
            parameter.size(),
            strides=parameter.stride(),
            dtype=parameter.dtype,
            device=parameter.device,
        )
        made.parameter_name = name
        made.received = None
        return made

    def __init__(self, *_: object) -> None:
        pass

    def untyped_storage(self) -> torch.UntypedStorage:
        """Returns an empty storage, for code that counts memory."""
        return torch.UntypedStorage(0, device=self.device)  # type: ignore[no-untyped-call]

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"<gradient of {self.parameter_name!r}, reduce-scattered>"

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, _types: Sequence[type], arguments: Any = (), _keywords: Any = None
    ) -> Any:
        first = arguments[0]
        if isinstance(first, ReducedGradient):
            if function is _aten.add_.Tensor:  # Autograd adds the next pass's gradient.
                more = arguments[1]
                first.received = more if first.received is None else first.received + more
                return first
            if function is _aten.add.Tensor:  # The same, out of place (create_graph=True).
                return arguments[1]
            if function in _CHANGES_NOTHING:
                return first
        if function is _aten._foreach_zero_.default:
            return None
        name = next(_reduced_in(arguments)).parameter_name
        raise UsageError(
            f"the gradient of parameter {name!r} was reduce-scattered, and each rank has its own "
            "shard of it only: clip with the container's clip_grad_norm_(), update with a "
            "ShardedOptimizer of its parameters; for whatever needs whole gradients, such as a "
            "GradScaler, use BucketedDataParallel"
        )


def _reduced_in(arguments: Any) -> Any:
    for argument in arguments:
        if isinstance(argument, ReducedGradient):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _reduced_in(argument)
