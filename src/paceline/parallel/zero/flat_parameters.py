"""Parameters in one flat buffer, of which every rank owns a shard.

The parameters keep their identity, shape and values, but are contiguous in memory, so a rank's
shard is one contiguous tensor and is sent in one message. A rank's optimizer updates views of its
shard: one tensor per parameter with elements in the shard. With a master dtype they are views of a
copy in that dtype, because rounding would lose small updates of bf16 or fp16 parameters.
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

    Args:
        layout: Positions of the parameters, and borders of the ranks' shards.
        parameters: The sharded list of parameters, which `Slot.tensor` indexes.
        names: The parameters' names, in the same order, for error messages.
        rank: This rank's index in the group.
        partition: Whether shards are slices of parameters or whole parameters.
        master_dtype: The dtype in which the optimizer updates its shards; by default the
            parameters' own dtype.
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
        """This rank's shard of the buffer, which is sent to the other ranks."""
        self.has_master = master_dtype is not None and master_dtype != layout.dtype
        self.master = (
            self.local_shard.to(master_dtype, copy=True) if self.has_master else self.local_shard
        )
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
        parameter in `UsedParameters` and the sum."""
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
        if self.has_master:
            self.local_shard.copy_(self.master)
        # Autograd must detect if a graph that has saved the old values runs backward.
        torch.autograd.graph.increment_version(self.parameters)
        self._versions = self._current_versions()
        self.arriving.start(start_all_gather(self.buffer, self.layout.borders, group))

    @property
    def is_in_flight(self) -> bool:
        """Whether a reader of a parameter has to wait."""
        return self.arriving.are_in_flight

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
