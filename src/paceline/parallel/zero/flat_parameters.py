"""Parameters in one flat buffer, of which every rank owns a shard.

Parameters of one dtype on one device are concatenated. Shard borders are a pure function of the
parameters' sizes and the number of ranks, so all ranks compute the same borders. There are two
partitions:

- By elements, for elementwise optimizers: shards are equally large and may split a parameter.
- By parameters, for all other optimizers: each whole parameter, the largest first, goes to the rank
  with the fewest bytes so far.

The parameters keep their identity, shape and values, but are contiguous in memory, so a rank's
shard is one contiguous tensor and is sent in one message. A rank's optimizer updates views of its
shard: one tensor per parameter with elements in the shard. With a master dtype they are views of a
copy in that dtype, because rounding would lose small updates of bf16 or fp16 parameters.

Every read of a parameter in flight waits for the new values first. Layers wait for their own
parameters when they are called. But other code may read a parameter too: a layer that shares a
weight, an average of the weights, a program that saves them. While new values are in flight, a
parameter therefore has a class with `__torch_function__`, which torch calls before any operation on
it. The first call waits for the values and restores the parameter's own class, so later operations
cost nothing extra. Identity, gradient and autograd state of the parameter do not change.
"""

import copy
import dataclasses
import enum
import weakref
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.accounting.buckets import assign_largest_first, equal_share
from paceline.core.errors import UsageError
from paceline.core.ranges import WAIT
from paceline.devices import accelerator
from paceline.devices.named_range import named_range
from paceline.parallel.buckets import (
    BucketPlan,
    Slot,
    TensorSpec,
    place_tensors,
    plan_buckets,
    view_like,
)
from paceline.parallel.ranks.collectives import start_all_gather
from paceline.parallel.ranks.pending import Pending


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

    `loads` are the bytes that each rank owns so far; `Partition.PARAMETERS` adds those that it
    assigns.
    """
    plans = plan_buckets(tensors, cap_bytes=None)
    if partition is Partition.ELEMENTS:
        return [shard_evenly(plan, len(loads)) for plan in plans]
    return [_assign_parameters(plan, tensors, loads) for plan in plans]


def _assign_parameters(
    plan: BucketPlan, tensors: Sequence[TensorSpec], loads: list[int]
) -> ShardLayout:
    indices = sorted(slot.tensor for slot in plan.slots)
    sizes = [tensors[index].num_elements * plan.dtype.itemsize for index in indices]
    owned: list[list[int]] = [[] for _ in loads]
    for index, owner in zip(indices, assign_largest_first(sizes, loads), strict=True):
        owned[owner].append(index)
    order = [index for of_rank in owned for index in of_rank]
    placed = place_tensors(tensors, order, plan.dtype, plan.device)
    borders = [0]
    first = 0
    for of_rank in owned:
        first += len(of_rank)
        is_last = first == len(placed.slots)
        borders.append(placed.num_elements if is_last else placed.slots[first].offset)
    return ShardLayout(plan.dtype, plan.device, placed.slots, borders)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Shard:
    """This rank's shard of one parameter."""

    parameter: nn.Parameter
    start: int
    """Index of its first element in memory order; a complex element counts twice."""
    end: int
    tensor: nn.Parameter
    """The tensor that the optimizer updates; the parameter itself if ranks own whole parameters."""

    @property
    def is_whole(self) -> bool:
        """Whether the shard is the parameter itself."""
        return self.tensor is self.parameter


class FlatParameters:
    """Moves parameters into one flat tensor, and holds this rank's shards of it.

    `Slot.tensor` of the layout indexes `parameters` and `names`. With another master dtype than the
    parameters', or with `keeps_master`, the optimizer updates a copy of the shards.
    """

    @torch.no_grad()
    def __init__(
        self,
        layout: ShardLayout,
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        *,
        rank: int,
        partition: Partition,
        master_dtype: torch.dtype | None = None,
        keeps_master: bool = False,
    ) -> None:
        self.layout = layout
        self.partition = partition
        self.parameters = [parameters[slot.tensor] for slot in layout.slots]
        self.names = [names[slot.tensor] for slot in layout.slots]
        self.buffer = torch.zeros(layout.num_elements, dtype=layout.dtype, device=layout.device)
        for slot, parameter in zip(layout.slots, self.parameters, strict=True):
            view = view_like(parameter, slot.piece_of(self.buffer))
            view.copy_(parameter)
            parameter.data = view
        self._addresses = [parameter.data_ptr() for parameter in self.parameters]
        self.local_shard = self.buffer[layout.borders[rank] : layout.borders[rank + 1]]
        """This rank's shard of the buffer, which is sent to the other ranks."""
        dtype = master_dtype or layout.dtype
        self.has_master = keeps_master or dtype != layout.dtype
        self.master = self.local_shard.to(dtype, copy=True) if self.has_master else self.local_shard
        """The tensor that this rank's optimizer updates."""
        self.shards = []
        begin = layout.borders[rank]
        for tensor, start, end, offset in layout.slices(rank):
            piece = self.master[offset - begin : offset - begin + end - start]
            self.shards.append(
                Shard(
                    parameter=parameters[tensor],
                    start=start,
                    end=end,
                    tensor=parameters[tensor]
                    if partition is Partition.PARAMETERS
                    else nn.Parameter(piece),
                )
            )
        self.gradient: Tensor = self.master[:0]
        """Gradient of the local shard, once a container has allocated it."""
        self.local_gradients: set[nn.Parameter] = set()
        """Parameters with local gradients, which are sent with the next averaged pass."""
        self.undecided: dict[Shard, tuple[int, Tensor]] = {}
        """Shards for which only other ranks may have had a gradient, with the index of the
        parameter in its container and the sum."""
        self.was_trained = False
        """Whether a container has averaged gradients that have not been dropped since; equal on all
        ranks."""
        self.arriving = ArrivingParameters(self.parameters, layout.device)
        self._versions = self._current_versions()

    @property
    def is_trained(self) -> bool:
        """Whether any of the parameters is not frozen; equal on all ranks."""
        return any(parameter.requires_grad for parameter in self.parameters)

    def zero_gradients(self, *, set_to_none: bool) -> None:
        """Clears the gradients of this rank's shards."""
        self.undecided.clear()
        self.local_gradients.clear()
        self.was_trained &= not set_to_none
        for shard in self.shards:
            if set_to_none:
                shard.tensor.grad = None
            elif shard.tensor.grad is not None:
                shard.tensor.grad.zero_()

    def offset_of(self, shard: Shard) -> int:
        """Returns the offset in the local shard of a shard that is a slice of its parameter."""
        return int(shard.tensor.storage_offset() - self.master.storage_offset())

    def gradient_of(self, shard: Shard) -> Tensor:
        """Returns a shard's part of the local shard's gradient."""
        begin = self.offset_of(shard)
        return self.gradient[begin : begin + shard.end - shard.start]

    def require_in_place(self) -> None:
        """Raises if a parameter's memory is no longer in the flat buffer."""
        for parameter, address, name in zip(
            self.parameters, self._addresses, self.names, strict=True
        ):
            if parameter.data_ptr() != address:
                raise UsageError(
                    f"parameter {name!r} was moved or converted after its memory was sharded over "
                    "the ranks; move and convert the model before wrapping it"
                )

    @torch.no_grad()
    def publish(self, group: dist.ProcessGroup) -> None:
        """Starts the all-gather of the ranks' shards."""
        # Autograd must detect if a graph that has saved the old values runs backward.
        torch.autograd.graph.increment_version(self.parameters)
        self._versions = self._current_versions()
        self.arriving.start(self._send(group))

    def _send(self, group: dist.ProcessGroup) -> Pending:
        if self.has_master:
            self.local_shard.copy_(self.master)
        return start_all_gather(self.buffer, self.layout.borders, group)

    def wait(self) -> None:
        """Waits until all shards have arrived, if they are in flight."""
        self.arriving.wait()

    def follow_edits(self) -> None:
        """Updates the master from parameters that were changed in place since they were sent."""
        if self.has_master and self._current_versions() != self._versions:
            self.refresh_master()

    def _current_versions(self) -> list[int]:
        return [parameter._version for parameter in self.parameters] if self.has_master else []

    @torch.no_grad()
    def refresh_master(self) -> None:
        """Copies changed parameter values to the master, for example after loading them.

        Elements of the master that round to the parameter's value are kept: they are more precise.
        """
        if self.has_master:
            is_same = self.master.to(self.local_shard.dtype) == self.local_shard
            self.master.copy_(
                torch.where(is_same, self.master, self.local_shard.to(self.master.dtype))
            )
            self._versions = self._current_versions()


def flat_elements(parameter: Tensor, values: Tensor) -> Tensor:
    """Returns values of a parameter's shape, flattened in the parameter's memory order.

    Each complex number becomes two real numbers. Shares memory with the values if possible.
    """
    if parameter.is_complex():
        return torch.view_as_real(values.contiguous()).view(-1)
    if values.stride() != parameter.stride():
        values = torch.empty_like(parameter, dtype=values.dtype).copy_(values)
    return values.as_strided((values.numel(),), (1,), values.storage_offset())


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


_PLAIN = (Tensor, nn.Parameter)
"""Types without a call of their own, which functions of Python pass on all the same."""


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
            # Other subclasses must get their call. In a stream other than the sender's, parameters
            # keep this class, and a new call of the function would come back here.
            for each in types:
                if not issubclass(each, _InFlight) and each not in _PLAIN:
                    return each.__torch_function__(function, types, arguments, keywords)  # type: ignore[attr-defined]
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
    """

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        self._device = device
        self._pending: Pending | None = None
        self._sender: Hashable = None
        """The stream that sent the values."""
        self._are_marked = False
        self.is_timed = accelerator.current_stream(device) is None
        """Whether readers' waits are timed; off by default on a GPU, where timing needs events."""
        self.waits: list[tuple[accelerator.Moment, accelerator.Moment]] = []
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
        self._sender = accelerator.current_stream(self._device)
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
            began = accelerator.now(self._device) if self.is_timed else None
            with named_range(WAIT):
                pending.wait()
            if began is not None:
                self.waits.append((began, accelerator.now(self._device)))
        stream = accelerator.current_stream(self._device)
        if stream is None:
            self._pending = None
        if self._are_marked and stream == self._sender:
            self._are_marked = False
            for reference, own, _ in self._classes:
                if (parameter := reference()) is not None:
                    parameter.__class__ = own
