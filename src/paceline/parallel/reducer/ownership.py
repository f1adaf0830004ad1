"""Who averages a parameter's gradients: one at a time, or they would be averaged twice."""

import gc
import weakref
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from paceline.core.errors import PacelineError

_owners: MutableMapping[Tensor, "weakref.ref[Any]"] = WeakIdKeyDictionary()
"""Weak on both sides."""


class SynchronizationError(PacelineError):
    """Gradients could not be synchronised on this rank."""


def claim(parameters: Sequence[Tensor], names: Sequence[str], owner: object) -> None:
    """Makes somebody the owner of parameters; an error names one that has another owner.

    Args:
        parameters: Not kept alive.
        names: What to call them.
        owner: Not kept alive.
    """
    for name, parameter in zip(names, parameters, strict=True):
        other = _owners.get(parameter)
        if other is not None and other() is not None:
            gc.collect()  # It may be dropped already, and wait in a cycle to be freed.
        if other is not None and other() is not None:
            raise SynchronizationError(
                f"parameter {name!r} already belongs to another data-parallel container; its "
                "gradients would be averaged twice"
            )
    for parameter in parameters:
        _owners[parameter] = weakref.ref(owner)


def release(parameters: Iterable[Tensor]) -> None:
    """Lets parameters go."""
    for parameter in parameters:
        _owners.pop(parameter, None)
