"""Parameters in flight: whatever reads one waits for it first.

Layers wait for their own parameters when they are called. But anything may read a parameter: a
layer that shares a weight, an average of the weights, a program that saves them. So as long as new
values are in flight, a parameter's class is one whose tensors torch asks before it does anything
with them (`__torch_function__`). The first question waits for the values, and gives the parameter
its own class back; from then on there is nothing to ask, and nothing to pay. Identity, gradient
and autograd's view of the parameter are the same throughout.
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

_tensor: Any = Tensor  # Its properties are themselves functions to torch.
_NEEDS_NO_VALUE: frozenset[Any] = frozenset(
    {
        _tensor.grad.__get__,
        _tensor.grad.__set__,
        _tensor.requires_grad.__get__,
        _tensor.requires_grad.__set__,
        _tensor.is_leaf.__get__,
    }
)
"""What is asked of parameters between a step and the next forward pass, such as by zero_grad."""


class _InFlight:
    """Waits before anything is done with a parameter."""

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
                return function(*arguments, **keywords)  # Others are to be asked, too.
        with torch._C.DisableTorchFunctionSubclass():
            return function(*arguments, **keywords)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._arriving.wait()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._arriving.wait()
        return self.__reduce_ex__(protocol)


class ArrivingParameters:
    """Parameters whose new values arrive together, and what to wait for.

    Readers wait for as long as the stream that had the values sent has not waited: whatever comes
    behind it in that stream, or in others that follow it, is in order from then on.

    Args:
        parameters: All of one device.
        device: The device.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        self._device = device
        self._pending: Pending | None = None
        self._sender: Hashable = None
        """The stream in which the values were sent off."""
        self._are_marked = False
        self.is_timed = device_clock.current_stream(device) is None
        """Whether it is noted how long readers wait: on a GPU that takes events."""
        self.waits: list[tuple[device_clock.Moment, device_clock.Moment]] = []
        """When readers have waited, since someone has last looked."""
        waiting: dict[type, type] = {}
        for own in dict.fromkeys(type(parameter) for parameter in parameters):
            waiting[own] = type(own.__name__, (_InFlight, own), {"_arriving": self})
        # A class is part of a cycle, and must not keep parameters until that is found.
        self._classes = [
            (weakref.ref(parameter), type(parameter), waiting[type(parameter)])
            for parameter in parameters
        ]

    def start(self, pending: Pending) -> None:
        """Lets readers wait from now on, if there is anything to wait for."""
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
        """Whether a reader would have to wait."""
        return self._are_marked

    def wait(self) -> None:
        """Waits until the values are here, on a GPU in the current stream.

        Values that have failed to come are an error for every reader.
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
