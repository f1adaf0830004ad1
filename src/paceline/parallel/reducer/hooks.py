"""Being told when a parameter's gradient is complete, without keeping anything alive.

A parameter holds its hooks, in a place that Python's garbage collector does not see. Were a hook to
hold whatever holds the parameter, neither would ever be freed.
"""

import weakref
from collections.abc import Callable
from typing import Protocol, TypeVar

from torch import Tensor
from torch.utils.hooks import RemovableHandle

Owner = TypeVar("Owner")


class GradientTaker(Protocol):
    """Somebody who takes in gradients by the places of their parameters."""

    def take(self, index: int) -> None:
        """Takes in a gradient that is complete."""


def when_complete(
    parameter: Tensor, owner: Owner, tell: Callable[[Owner], None]
) -> RemovableHandle:
    """Calls ``tell(owner)`` after each gradient of a parameter, as long as the owner lives."""
    reference = weakref.ref(owner)

    def hook(_parameter: Tensor) -> None:
        if (alive := reference()) is not None:
            tell(alive)

    return _register(parameter, hook)


def take_when_complete(parameter: Tensor, owner: GradientTaker, index: int) -> RemovableHandle:
    """Calls ``owner.take(index)`` after each gradient of a parameter, in as few steps as can be."""
    reference = weakref.ref(owner)

    def hook(_parameter: Tensor) -> None:
        if (alive := reference()) is not None:
            alive.take(index)

    return _register(parameter, hook)


def _register(parameter: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return handle
