"""Registry that connects a container's sharded parameters with the optimizer that updates them.

The container knows when a bucket's gradients have arrived, the optimizer how to step. They hold
only weak references to each other. Parameters are looked up by identity, so an optimizer needs
nothing but the parameters.
"""

import gc
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from paceline.core.errors import UsageError
from paceline.parallel.ranks.device_clock import Moment
from paceline.parallel.reducer.settings import GroupReference
from paceline.parallel.zero.flat_parameters import FlatParameters
from paceline.parallel.zero.used_parameters import UsedParameters

_Step: TypeAlias = Callable[[FlatParameters], None]

_known: MutableMapping[Tensor, "weakref.ref[ShardedParameters]"] = WeakIdKeyDictionary()


class ShardedParameters:
    """The flat parameters of one container, one object per bucket.

    Args:
        flats: The flat parameters, in the order in which the next forward pass needs them.
        group: The ranks that hold the shards.
        used: Tracks which parameters had a gradient on any rank.
        steps_in_backward: Whether each bucket's parameters are updated as soon as their gradients
            have arrived.
    """

    def __init__(
        self,
        flats: Sequence[FlatParameters],
        group: GroupReference,
        used: UsedParameters,
        *,
        steps_in_backward: bool,
    ) -> None:
        self.flats = flats
        self.group = group
        self._used = used
        self.steps_in_backward = steps_in_backward
        self.has_stepped = False
        """Whether parameters were updated in backward since the optimizer's last step."""
        self._find_step: Callable[[], _Step | None] = lambda: None
        for flat in flats:
            for parameter in flat.parameters:
                _known[parameter] = weakref.ref(self)

    @property
    def has_optimizer(self) -> bool:
        """Whether an optimizer is attached and alive."""
        return self._find_step() is not None

    def attach(self, step_flat: _Step) -> None:
        """Registers the optimizer method that updates this rank's shards of flat parameters."""
        if self._find_step() not in (None, step_flat):
            gc.collect()  # The old optimizer may be unreachable, but held by a reference cycle.
        if self._find_step() not in (None, step_flat):
            raise UsageError(
                "the parameters of a ShardedDataParallel already belong to another "
                "ShardedOptimizer; give one optimizer several groups instead"
            )
        self._find_step = weakref.WeakMethod(step_flat)

    def step_flat(self, flat: FlatParameters) -> None:
        """Updates and sends this rank's shards of a bucket whose gradients have arrived."""
        if (step := self._find_step()) is None:
            raise UsageError(
                "a ShardedDataParallel that steps in backward has no optimizer; create a "
                "ShardedOptimizer for its parameters before the first backward"
            )
        self.has_stepped = True
        step(flat)

    def decide_gradients(self) -> None:
        """Sets the gradient of undecided shards that had one on any rank.

        Waits for the device only if there are undecided shards.
        """
        self._used.decide_gradients(self.flats)

    def zero_gradients(self, *, set_to_none: bool) -> None:
        """Clears the gradients of all shards."""
        if set_to_none:
            self._used.forget()
        else:
            self.decide_gradients()
        for flat in self.flats:
            flat.zero_gradients(set_to_none=set_to_none)

    @property
    def are_in_flight(self) -> bool:
        """Whether a reader of some parameter has to wait."""
        return any(flat.is_in_flight for flat in self.flats)

    def take_waits(self) -> list[tuple[Moment, Moment]]:
        """Returns and clears the recorded waits of readers for parameters."""
        waits = [moments for flat in self.flats for moments in flat.arriving.waits]
        for flat in self.flats:
            flat.arriving.waits.clear()
        return waits

    def time_waits(self) -> None:
        """Turns on timing of the readers' waits."""
        for flat in self.flats:
            flat.arriving.is_timed = True

    def wait(self) -> None:
        """Waits until all parameters have their new values."""
        for flat in self.flats:
            flat.wait()


def find_sharded_parameters(parameter: nn.Parameter) -> ShardedParameters | None:
    """Returns the sharded parameters that contain a parameter; None if it is not sharded."""
    reference: Any = _known.get(parameter)
    return None if reference is None else reference()
