"""Parameters in one flat buffer, of which every rank has a shard.

The parameters keep their identity, shape and values, but lie one behind another, so that a rank's
shard is one contiguous tensor and goes to the others in one message. What the optimizer of a rank
updates are its parts of it: one tensor per parameter that its shard holds elements of, all of them
views of the shard. With a master dtype they are views of a copy in that dtype, for parameters in
bf16 or fp16 whose updates would be rounded away.
"""

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.core.errors import UsageError
from paceline.parallel.buckets import view_like
from paceline.parallel.partition import Partition, ShardLayout
from paceline.parallel.ranks.reduce_scatter import start_all_gather
from paceline.parallel.zero.in_flight import ArrivingParameters


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Shard:
    """This rank's shard of one parameter."""

    parameter: nn.Parameter
    start: int
    """First of its elements, in the order of the parameter's memory; a complex one counts twice."""
    end: int
    tensor: nn.Parameter
    """What the optimizer updates; the parameter itself where ranks own whole parameters."""

    @property
    def is_whole(self) -> bool:
        """Whether it is the parameter itself."""
        return self.tensor is self.parameter


class FlatParameters:
    """Moves parameters into one flat tensor, and keeps this rank's shards of it.

    Args:
        layout: Where they lie, and where the ranks' shards begin.
        parameters: The list that was laid out, by place.
        names: What to call them, by place.
        rank: This rank's place in the group.
        partition: Whether shards are cut from parameters, or parameters themselves.
        master_dtype: What the optimizer updates its shards in; by default the parameters' own.
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
        """This rank's shard of the buffer, as the others see it."""
        self.has_master = master_dtype is not None and master_dtype != layout.dtype
        self.master = (
            self.local_shard.to(master_dtype, copy=True) if self.has_master else self.local_shard
        )
        """What this rank's optimizer updates."""
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
        """Gradient of the local shard, once a container has made room for it."""
        self.local_gradients: set[nn.Parameter] = set()
        """Parameters whose gradients are this rank's own, to be sent with the next pass."""
        self.undecided: dict[Shard, tuple[int, Tensor]] = {}
        """Shards that other ranks may have had a gradient for, the places of their parameters among
        all, and the sums."""
        self.was_trained = False
        """Whether a container has averaged gradients here that were not dropped since; the same on
        all ranks."""
        self.arriving = ArrivingParameters(self.parameters, layout.device)
        self._versions = self._current_versions()

    @property
    def is_trained(self) -> bool:
        """Whether any of the parameters is not frozen; the same on all ranks."""
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
        """Returns where a shard that was cut from its parameter begins in the local shard."""
        return int(shard.tensor.storage_offset() - self.master.storage_offset())

    def gradient_of(self, shard: Shard) -> Tensor:
        """Returns a shard's part of the local shard's gradient."""
        begin = self.offset_of(shard)
        return self.gradient[begin : begin + shard.end - shard.start]

    def require_in_place(self) -> None:
        """Raises if a parameter no longer lies where it was put, naming it."""
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
        """Starts to send this rank's shard to all, and to receive theirs."""
        if self.has_master:
            self.local_shard.copy_(self.master)
        # A graph that has saved the old values must not be run backward with the new ones.
        torch.autograd.graph.increment_version(self.parameters)
        self._versions = self._current_versions()
        self.arriving.start(start_all_gather(self.buffer, self.layout.borders, group))

    @property
    def is_in_flight(self) -> bool:
        """Whether a reader of a parameter would have to wait."""
        return self.arriving.are_in_flight

    def wait(self) -> None:
        """Waits until all shards are here, if they are in flight."""
        self.arriving.wait()

    def follow_edits(self) -> None:
        """Lets the master follow parameters that were changed in place since they were sent."""
        if self.has_master and self._current_versions() != self._versions:
            self.refresh_master()

    def _current_versions(self) -> list[int]:
        return [parameter._version for parameter in self.parameters] if self.has_master else []

    @torch.no_grad()
    def refresh_master(self) -> None:
        """Takes the parameters' values for the master's where they differ, as after loading them.

        Where a parameter is what the master is rounded to, the master knows better.
        """
        if self.has_master:
            is_same = self.master.to(self.local_shard.dtype) == self.local_shard
            self.master.copy_(
                torch.where(is_same, self.master, self.local_shard.to(self.master.dtype))
            )
            self._versions = self._current_versions()


def flat_elements(parameter: Tensor, values: Tensor) -> Tensor:
    """Returns values of a parameter's shape, flat in the order of the parameter's memory.

    Complex numbers are two real ones each. Shares memory with the values where it can.
    """
    if parameter.is_complex():
        return torch.view_as_real(values.contiguous()).view(-1)
    if values.stride() != parameter.stride():
        values = torch.empty_like(parameter, dtype=values.dtype).copy_(values)
    return values.as_strided((values.numel(),), (1,), values.storage_offset())
