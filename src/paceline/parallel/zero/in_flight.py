"""Parameters in flight: every read waits for the new values first.

Layers wait for their own parameters when they are called. But other code may read a parameter too:
a layer that shares a weight, an average of the weights, a program that saves them. While new values
are in flight, a parameter therefore has a class with `__torch_function__`, which torch calls before
any operation on it. The first call waits for the values and restores the parameter's own class, so
later operations cost nothing extra. Identity, gradient and autograd state of the parameter do not
change.
"""

import copy
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.ranges import WAIT
from paceline.kernels.named_range import named_range
from paceline.parallel.ranks import device_clock
from paceline.parallel.ranks.pending import Pending

_tensor: Any = Tensor  # torch passes property accessors to `__torch_function__`.
_NEEDS_NO_VALUE: frozenset[Any] = frozenset(
    {
        _tensor.grad.__get__,
        _tensor.grad.__set__,
        _tensor.requires_grad.__get__,
        _tensor.requires_grad.__set__,
        _tensor.is_leaf.__get__,
    }
)
"""Accessors that read no values, used between a step and the next forward pass (zero_grad)."""


class _InFlight:
    """Waits before any operation on a parameter."""

    _arriving: "ArrivingParameters"

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], arguments: Any = (), keywords: Any = None
    ) -> Any:
        keywords = keywords or {}
        if function not in _NEEDS_NO_VALUE:
            for each in types:
                if issubclass(each, _InFlight):
                    each._arriving.wait()
            if not all(issubclass(each, _InFlight) for each in types):
                return function(*arguments, **keywords)  # Other subclasses must get their call.
        with torch._C.DisableTorchFunctionSubclass():
            return function(*arguments, **keywords)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._arriving.wait()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._arriving.wait()
        return self.__reduce_ex__(protocol)


class ArrivingParameters:
    """Parameters whose new values arrive together.

    Readers wait until the stream that sent the values has waited. All later work in that stream,
    and in streams ordered after it, then sees the new values.

    Args:
        parameters: Parameters on one device.
        device: The device.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        self._device = device
        self._pending: Pending | None = None
        self._sender: Hashable = None
        """The stream that sent the values."""
        self._are_marked = False
        self.is_timed = device_clock.current_stream(device) is None
        """Whether readers' waits are timed; off by default on a GPU, where timing needs events."""
        self.waits: list[tuple[device_clock.Moment, device_clock.Moment]] = []
        """Start and end of the readers' waits since the list was last cleared."""
        waiting: dict[type, type] = {}
        for own in dict.fromkeys(type(parameter) for parameter in parameters):
            waiting[own] = type(own.__name__, (_InFlight, own), {"_arriving": self})
        # A class is part of a reference cycle; weak references let parameters be freed before it.
        self._classes = [
            (weakref.ref(parameter), type(parameter), waiting[type(parameter)])
            for parameter in parameters
        ]

    def start(self, pending: Pending) -> None:
        """Makes readers wait for an operation, unless it has already been waited for."""
        if pending.is_awaited:
            return
        self._pending = pending
        self._sender = device_clock.current_stream(self._device)
        self._are_marked = True
        for reference, _, waiting in self._classes:
            if (parameter := reference()) is not None:
                parameter.__class__ = waiting

    @property
    def are_in_flight(self) -> bool:
        """Whether a reader has to wait."""
        return self._are_marked

    def wait(self) -> None:
        """Waits until the values have arrived, on a GPU in the current stream.

        Raises for every reader if the transfer failed.
        """
        pending = self._pending
        if pending is None:
            return
        if not pending.is_awaited:
            began = device_clock.now(self._device) if self.is_timed else None
            with named_range(WAIT):
                pending.wait()
            if began is not None:
                self.waits.append((began, device_clock.now(self._device)))
        stream = device_clock.current_stream(self._device)
        if stream is None:
            self._pending = None
        if self._are_marked and stream == self._sender:
            self._are_marked = False
            for reference, own, _ in self._classes:
                if (parameter := reference()) is not None:
                    parameter.__class__ = own
