"""What compressed messages have left out of one parameter's gradient, on one rank."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from paceline.parallel.buckets import Slot


class Residual(NamedTuple):
    """A range of one parameter's numbers, in memory order, that messages have left out."""

    name: str
    """The parameter's name."""
    is_out: bool
    """Whether a rank's own gradients lack the numbers, or a sum over the ranks."""
    start: int
    total: int
    """Numbers of the whole parameter."""
    numbers: Tensor
    """A view, in which the numbers may be replaced."""


@runtime_checkable
class HasResiduals(Protocol):
    """A bucket whose messages are compressed."""

    def residuals(self) -> Iterator[Residual]:
        """Yields what this rank's messages have left out, by parameter."""


def left_of_gradients(
    slots: Sequence[Slot], names: Sequence[str], left_out: Tensor
) -> Iterator[Residual]:
    """Yields what a rank's messages have left out of its gradients, for each tensor of a bucket."""
    for slot, name in zip(slots, names, strict=True):
        yield Residual(name, True, 0, slot.num_elements, slot.piece_of(left_out))


def left_of_sums(
    slots: Sequence[Slot], names: Sequence[str], left_back: Tensor, own: slice
) -> Iterator[Residual]:
    """Yields what a rank's messages have left out of the sums of its own piece of a bucket."""
    for slot, name in zip(slots, names, strict=True):
        begin = max(slot.offset, own.start)
        end = min(slot.offset + slot.num_elements, own.stop)
        if begin < end:
            numbers = left_back[begin - own.start : end - own.start]
            yield Residual(name, False, begin - slot.offset, slot.num_elements, numbers)
