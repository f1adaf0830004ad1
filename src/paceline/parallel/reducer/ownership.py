"""Ownership of parameters: each has one owner, so its gradients are never averaged twice."""

import gc
import weakref
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from paceline.core.errors import PacelineError

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
