"""A layer's gradient message: collected, reduce-scattered, and added to the shards' gradients.

A message has one row per rank: that rank's rows of every gradient, followed by one flag per
parameter, which is 1 if the sender has a gradient for it. The flags are summed together with the
gradients, which shows each rank without another collective which parameters had a gradient on any
rank.

Without synchronisation, full gradients stay on this rank, in the parameters' own dtype, and are
sent with the next message.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.parallel.buckets import RankWeight, reducible_gradient
from paceline.parallel.fsdp.layout import LayerLayout
from paceline.parallel.fsdp.sharding import LayerParameter, Sharding
from paceline.parallel.fsdp.traffic import Traffic
from paceline.parallel.ranks.collectives import ReduceScatter, start_reduce_scatter
from paceline.parallel.ranks.pending import Pending


class GradientMessage:
    """The gradients of one layer.

    Args:
        layout: Positions of the gradients.
        parameters: The parameters of the gradients.
        sharding: The distribution of the gradients over ranks.
        dtype: The dtype in which they are computed.
        reduce_dtype: The dtype in which they are sent; None for `dtype`.
        traffic: Records messages and waits.
    """

    def __init__(
        self,
        layout: LayerLayout,
        parameters: Sequence[LayerParameter],
        *,
        sharding: Sharding,
        dtype: torch.dtype,
        reduce_dtype: torch.dtype | None,
        traffic: Traffic,
    ) -> None:
        self._layout = layout
        self._parameters = parameters
        self._sharding = sharding
        self._dtype = dtype
        self._reduce_dtype = reduce_dtype or dtype
        self._traffic = traffic
        self._open: Tensor | None = None
        self._in_open: set[int] = set()
        self._kept: Tensor | None = None
        self._in_kept: set[int] = set()
        self._in_flight: list[tuple[ReduceScatter, int]] = []
        self._sums: list[tuple[Tensor, Pending | None]] = []
        self.arrived: set[int] = set()
        """Positions of parameters whose gradient this rank has sent in this pass."""

    @property
    def unsent(self) -> list[str]:
        """Names of parameters whose gradients have not yet been sent in this pass."""
        return [self._parameters[position].name for position in sorted(self._in_open)]

    @torch.no_grad()
    def take(self, position: int, *, keep: bool) -> None:
        """Moves a complete gradient of one of the parameters into the message.

        Args:
            position: Index of the parameter.
            keep: Whether the gradient stays local until a later pass is averaged.
        """
        parameter = self._parameters[position]
        gradient = reducible_gradient(
            parameter.full, parameter.name, self._dtype, self._layout.device
        )
        parameter.full.grad = None
        if keep:
            self._kept = self._new(self._layout.dtype) if self._kept is None else self._kept
            target, present = self._kept, self._in_kept
        else:
            self._open = self._new(self._reduce_dtype) if self._open is None else self._open
            target, present = self._open, self._in_open
        for rows, own in parameter.piece.blocks(target, gradient):
            # A second gradient in one pass comes from a reentrant checkpoint's nested backward.
            rows.add_(own) if position in present else rows.copy_(own)
        present.add(position)

    @torch.no_grad()
    def send(self, weight: RankWeight | None) -> None:
        """Starts the reduce-scatter of the gradients, with zeros for missing ones.

        Args:
            weight: Weight of this rank's gradients in the average; None if all have equal weight.
        """
        message = self._open
        if message is None:
            message = self._new(self._reduce_dtype)
        if self._kept is not None:
            message = self._add_kept(message)
        length = self._layout.length
        present = self._in_open | self._in_kept
        message[:, length:].fill_(1)
        for position, parameter in enumerate(self._parameters):
            if position not in present:
                piece = parameter.piece
                message[:, piece.offset : piece.offset + piece.num_elements].zero_()
                message[:, length + position].zero_()
        if weight is not None:
            weight.scale([message[:, :length]])
        self.arrived |= present
        self._open = self._kept = None
        self._in_open, self._in_kept = set(), set()
        self._in_flight.append((self._start(message), self._traffic.num_messages))
        self._traffic.sent(message.nbytes, len(self._parameters))

    @torch.no_grad()
    def receive(self) -> None:
        """Waits for messages in flight, frees them, and starts the all-reduce over replicas."""
        in_flight, self._in_flight = self._in_flight, []
        for reduce_scatter, number in in_flight:
            self._traffic.wait(reduce_scatter, number)
            layout = self._layout
            total = torch.empty(layout.row_length, dtype=layout.dtype, device=layout.device)
            reduce_scatter.add_to(total, overwrite=True)
            groups = self._sharding.replicate_groups
            pending = None
            if groups:
                work = dist.all_reduce(total, group=groups[0].get(), async_op=True)
                pending = Pending("all-reduce of shards", total.nbytes, [work], total.device)
            self._sums.append((total, pending))

    @torch.no_grad()
    def total(self) -> Tensor | None:
        """Returns the sum of all ranks' messages of this pass; None if there were none."""
        sums, self._sums = self._sums, []
        result: Tensor | None = None
        for total, pending in sums:
            if pending is not None:
                self._traffic.wait(pending)
            for group in self._sharding.replicate_groups[1:]:
                dist.all_reduce(total, group=group.get())
            result = total if result is None else result.add_(total)
        return result

    @torch.no_grad()
    def settle(self, total: Tensor, *, divide: bool, some_rank_had: Sequence[float] | None) -> None:
        """Adds the means to the shards' gradients.

        Args:
            total: The sum over all ranks.
            divide: Whether to divide it by the number of ranks.
            some_rank_had: For each parameter, whether any rank had a gradient for it; None if this
                rank had a gradient for all trained parameters.
        """
        if divide:
            total[: self._layout.length].div_(self._sharding.num_ranks)
        for position, parameter in enumerate(self._parameters):
            if position in self.arrived or (some_rank_had and some_rank_had[position]):
                parameter.add_gradient(parameter.piece.local(total, self._sharding.shard))
        self.arrived = set()

    @property
    def is_missing(self) -> bool:
        """Whether this rank had no gradient for some trained parameter."""
        return any(
            parameter.shard.requires_grad and position not in self.arrived
            for position, parameter in enumerate(self._parameters)
        )

    def flags(self, total: Tensor) -> Tensor:
        """Returns the flags that follow the gradients."""
        return total[self._layout.length : self._layout.length + len(self._parameters)]

    def drop(self) -> None:
        """Discards the gradients of a pass, except those kept for a later pass."""
        self._open, self._in_open = None, set()
        self._in_flight, self._sums, self.arrived = [], [], set()
        for parameter in self._parameters:
            parameter.full.grad = None

    def _start(self, message: Tensor) -> ReduceScatter:
        group = self._sharding.shard_group
        if group is None:
            return ReduceScatter(message, [message[0]], [])
        return start_reduce_scatter(message.view(-1), group.get())

    def _add_kept(self, message: Tensor) -> Tensor:
        """Returns a message that includes kept gradients, summed in the parameters' dtype."""
        assert self._kept is not None
        for position in self._in_open:
            piece = self._parameters[position].piece
            columns = slice(piece.offset, piece.offset + piece.num_elements)
            if position in self._in_kept:
                self._kept[:, columns].add_(message[:, columns])
            else:
                self._kept[:, columns].copy_(message[:, columns])
        return self._kept.to(self._reduce_dtype)

    def _new(self, dtype: torch.dtype) -> Tensor:
        # Padding between the pieces is sent, but never read.
        layout = self._layout
        shape = (layout.num_shards, layout.row_length)
        return torch.empty(shape, dtype=dtype, device=layout.device)
