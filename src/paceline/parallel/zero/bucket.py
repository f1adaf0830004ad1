"""Buckets whose gradients are reduce-scattered.

A bucket's message is as large as its parameters, and exists only while it is filled and in flight.
Gradients are moved into it as backward completes them, and freed. When the message has arrived,
this rank's shard of the sum is added to its shards' gradients, and the message is freed. Only the
gradient of the shard persists from step to step.

A parameter whose gradient was moved into a message has a `ReducedGradient` instead.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.parallel.buckets import BucketPlan, reducible_gradient, view_like
from paceline.parallel.ranks.rank_weight import RankWeight
from paceline.parallel.ranks.reduce_scatter import ReduceScatter, start_reduce_scatter
from paceline.parallel.zero.flat_parameters import FlatParameters
from paceline.parallel.zero.reduced_gradient import ReducedGradient
from paceline.parallel.zero.used_parameters import UsedParameters


class ShardedBucket:
    """A bucket that is reduce-scattered.

    Args:
        plan: Layout of the bucket.
        flat: Its parameters, sharded over the ranks.
        used: Tracks which parameters had a gradient on any rank.
        places: The indices of its parameters in `used`.
        message_dtype: The dtype of the message.
        shard_group: Returns the group of the ranks that hold the shards.
        when_landed: Called when the message has arrived.
        sends_counts: Whether to send the counts of `used` after this bucket.
    """

    is_received_early = True
    """Whether messages use separate memory, which is freed when they have been received."""

    def __init__(
        self,
        plan: BucketPlan,
        flat: FlatParameters,
        used: UsedParameters,
        places: Sequence[int],
        *,
        message_dtype: torch.dtype,
        shard_group: Callable[[], dist.ProcessGroup],
        when_landed: Callable[["ShardedBucket"], None],
        sends_counts: bool,
    ) -> None:
        self.plan = plan
        self.flat = flat
        self.parameters = flat.parameters
        self._dtypes = [parameter.dtype for parameter in flat.parameters]
        self._reduced = [
            ReducedGradient(*named) for named in zip(flat.parameters, flat.names, strict=True)
        ]
        self.used = used
        """Tracks which parameters had a gradient on any rank."""
        self._places = places
        self._message_dtype = message_dtype
        self._shard_group = shard_group
        self._when_landed = when_landed
        self._sends_counts = sends_counts
        self._buffer: Tensor | None = None
        self._views: list[Tensor] = []
        self._missing: dict[nn.Parameter, int] = {}
        """Parameters without a gradient on this rank, and their indices in `used`."""
        self._reduce_scatter: ReduceScatter | None = None
        self._gaps = list(_gaps(plan, flat.layout.num_elements))
        flat.gradient = torch.zeros_like(flat.master)

    def keep(self, position: int) -> None:
        """Leaves a gradient in place, because it is not sent in this pass."""
        parameter = self.parameters[position]
        self.flat.local_gradients.add(parameter)
        # A tensor added to a reduced gradient may also be another parameter's gradient: copy it.
        is_shared = type(parameter.grad) is ReducedGradient
        gradient = self._gradient(position)
        if is_shared:
            parameter.grad = torch.empty_like(parameter).copy_(gradient)

    def take(self, positions: Sequence[int], weight: RankWeight) -> None:
        """Moves gradients into the message, scaled by the weight."""
        if self._buffer is None:
            self._open()
        gradients = [self._gradient(position) for position in positions]
        weight.scale_into(
            [torch.view_as_real(grad) if grad.is_complex() else grad for grad in gradients],
            [self._views[position] for position in positions],
        )
        for position in positions:
            self.parameters[position].grad = self._reduced[position]
            if self.flat.local_gradients:
                self.flat.local_gradients.discard(self.parameters[position])

    def pack(self, taken: set[int], weight: RankWeight) -> Tensor:
        """Returns the message, with zeros for missing gradients."""
        if self._buffer is None:
            self._open()
        left = []
        for position, parameter in enumerate(self.parameters):
            if position in taken:
                continue
            if not self._has_gradient(parameter):
                self._views[position].zero_()
                self._missing[parameter] = self._places[position]
                self.used.note_missing(self._places[position])
            else:
                left.append(position)
        self.take(left, weight)
        assert self._buffer is not None
        return self._buffer

    def start(self, message: Tensor, group: dist.ProcessGroup) -> ReduceScatter:
        """Starts the reduce-scatter."""
        self._reduce_scatter = start_reduce_scatter(message, self._shard_group())
        if self._sends_counts:
            self.used.start(group)
        return self._reduce_scatter

    def unpack(self, _message: Tensor) -> None:
        """Calls `when_landed`, which adds this rank's shard of the sum and frees the message."""
        self._when_landed(self)

    def add_sum_to(self, target: Tensor, *, overwrite: bool) -> None:
        """Adds this rank's shard of the sum to a tensor, or overwrites it; frees the message."""
        assert self._reduce_scatter is not None
        self._reduce_scatter.add_to(target, overwrite=overwrite)
        self._reduce_scatter = self._buffer = None
        self._views = []

    def zero_what_has_no_gradient(self) -> None:
        """Zeros the gradients of shards that have none from an earlier pass."""
        for shard in self.flat.shards:
            if shard.tensor.grad is None and shard not in self.flat.undecided:
                self.flat.gradient_of(shard).zero_()

    def give_gradients(self) -> None:
        """Sets the shards' gradients, except for parameters without a gradient on this rank."""
        for shard in self.flat.shards:
            if shard.parameter not in self._missing:
                self.flat.undecided.pop(shard, None)
                shard.tensor.grad = self.flat.gradient_of(shard)
            elif shard.tensor.grad is None:
                place = self._missing[shard.parameter]
                self.flat.undecided[shard] = place, self.flat.gradient_of(shard)
        self._missing = {}
        self.flat.was_trained |= self.flat.is_trained

    @property
    def is_accumulating(self) -> bool:
        """Whether shards have gradients of an earlier pass, to which this pass adds."""
        return bool(self.flat.undecided) or any(
            shard.tensor.grad is not None for shard in self.flat.shards
        )

    @staticmethod
    def _has_gradient(parameter: nn.Parameter) -> bool:
        gradient = parameter.grad
        if type(gradient) is ReducedGradient:
            return gradient.received is not None
        return gradient is not None

    def _gradient(self, position: int) -> Tensor:
        gradient = self.parameters[position].grad
        if type(gradient) is ReducedGradient:
            self.parameters[position].grad, gradient.received = gradient.received, None
        return reducible_gradient(
            self.parameters[position],
            self.flat.names[position],
            self._dtypes[position],
            self.plan.device,
        )

    def _open(self) -> None:
        num_elements = self.flat.layout.num_elements
        self._buffer = torch.empty(num_elements, dtype=self._message_dtype, device=self.plan.device)
        for begin, end in self._gaps:
            self._buffer[begin:end] = 0  # The optimizer updates the gaps together with the shards.
        pieces = [slot.piece_of(self._buffer) for slot in self.plan.slots]
        self._views = [
            # Complex numbers are sent as pairs of reals: there are no narrow complex dtypes.
            piece.view(*parameter.shape, 2)
            if parameter.is_complex()
            else view_like(parameter, piece)
            for piece, parameter in zip(pieces, self.parameters, strict=True)
        ]


def _gaps(plan: BucketPlan, num_elements: int) -> Iterator[tuple[int, int]]:
    """Yields the padding ranges between a bucket's tensors and after the last one."""
    end = 0
    for slot in plan.slots:
        if slot.offset > end:
            yield end, slot.offset
        end = slot.offset + slot.num_elements
    if num_elements > end:
        yield end, num_elements
