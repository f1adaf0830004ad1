"""Hooks that run when a parameter's gradient is complete and hold only weak references.

A parameter holds its hooks in memory that Python's garbage collector does not traverse. If a hook
held a strong reference to the parameter's owner, neither would ever be freed.
"""

import weakref
from collections.abc import Callable
from typing import Protocol, TypeVar

from torch import Tensor
from torch.utils.hooks import RemovableHandle

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
