"""The mapping of parameter elements to the ranks' shards.

Parameters of one dtype on one device are concatenated in a flat buffer, and every rank owns one
shard of it. Shard borders are a pure function of the parameters' sizes and the number of ranks, so
all ranks compute the same borders. There are two partitions:

- By elements, for elementwise optimizers: shards are equally large and may split a parameter.
- By parameters, for all other optimizers: each whole parameter, the largest first, goes to the rank
  with the fewest bytes so far.
"""

import enum
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from paceline.accounting.buckets import assign_largest_first, equal_share
from paceline.core.errors import UsageError
from paceline.parallel.buckets import BucketPlan, Slot, TensorSpec, place_tensors, plan_buckets


class Partition(enum.StrEnum):
    """How parameters are sharded over ranks."""

    ELEMENTS = "elements"
    PARAMETERS = "parameters"


_ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
"""Optimizers that update each element independently, so a shard may split a parameter."""


def choose_partition(partition: str | None, optimizer_cls: type[Optimizer]) -> Partition:
    """Returns the partition for an optimizer, by default the finest that it allows."""
    is_elementwise = optimizer_cls in _ELEMENTWISE
    if partition is None:
        return Partition.ELEMENTS if is_elementwise else Partition.PARAMETERS
    if partition not in tuple(Partition):
        raise UsageError(
            f"partition must be one of {', '.join(Partition)}, or None; got {partition!r}"
        )
    if partition == Partition.ELEMENTS and not is_elementwise:
        raise UsageError(
            f"{optimizer_cls.__name__} is not known to be elementwise, so single parameters must "
            'not be split; use partition="parameters"'
        )
    return Partition(partition)


class ParameterSlice(NamedTuple):
    """A range of elements of one parameter, in memory order, that one rank owns."""

    tensor: int
    """The parameter's index in the sharded list."""
    start: int
    end: int
    offset: int
    """Start of the slice in the flat buffer."""


class ShardLayout(NamedTuple):
    """A flat buffer and the ranks' shards of it."""

    dtype: torch.dtype
    device: torch.device
    slots: tuple[Slot, ...]
    borders: Sequence[int]
    """Start of each rank's shard, in rank order, followed by the end of the last one."""

    @property
    def num_elements(self) -> int:
        """Total elements of all shards, including padding."""
        return self.borders[-1]

    def slices(self, rank: int) -> Iterator[ParameterSlice]:
        """Yields the slices that a rank owns, in the order of the flat buffer."""
        begin, end = self.borders[rank], self.borders[rank + 1]
        for tensor, offset, num_elements in self.slots:
            first, last = max(begin, offset), min(end, offset + num_elements)
            if first < last:
                yield ParameterSlice(tensor, first - offset, last - offset, first)


def shard_evenly(plan: BucketPlan, num_ranks: int) -> ShardLayout:
    """Assigns every rank an equal number of elements of a bucket, padded at its end."""
    shard = equal_share(plan.num_elements, num_ranks, plan.dtype.itemsize)
    borders = range(0, shard * num_ranks + 1, shard) if shard else (0,) * (num_ranks + 1)
    return ShardLayout(plan.dtype, plan.device, plan.slots, borders)


def plan_shards(
    tensors: Sequence[TensorSpec], loads: list[int], partition: Partition
) -> list[ShardLayout]:
    """Lays out one flat buffer per dtype and device, and shards each over all ranks.

    Args:
        tensors: The tensors to shard.
        loads: Bytes that each rank owns so far. `Partition.PARAMETERS` adds the bytes it assigns.
        partition: How to shard the buffers.
    """
    plans = plan_buckets(tensors, cap_bytes=None)
    if partition is Partition.ELEMENTS:
        return [shard_evenly(plan, len(loads)) for plan in plans]
    return [_assign_parameters(plan, tensors, loads) for plan in plans]


def _assign_parameters(
    plan: BucketPlan, tensors: Sequence[TensorSpec], loads: list[int]
) -> ShardLayout:
    places = sorted(slot.tensor for slot in plan.slots)
    sizes = [tensors[place].num_elements * plan.dtype.itemsize for place in places]
    owned: list[list[int]] = [[] for _ in loads]
    for place, owner in zip(places, assign_largest_first(sizes, loads), strict=True):
        owned[owner].append(place)
    order = [place for of_rank in owned for place in of_rank]
    placed = place_tensors(tensors, order, plan.dtype, plan.device)
    borders = [0]
    first = 0
    for of_rank in owned:
        first += len(of_rank)
        is_last = first == len(placed.slots)
        borders.append(placed.num_elements if is_last else placed.slots[first].offset)
    return ShardLayout(plan.dtype, plan.device, placed.slots, borders)
