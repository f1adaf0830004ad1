"""Gradients that are reduce-scattered, bucket by bucket.

A bucket's message is as long as its parameters, and exists only while it is in flight: gradients
move into it as backward completes them, and are freed; when it has arrived, this rank's shard of
the sum is added to its shards' gradients, and the message is freed as well. What stays from step
to step is the gradient of the shard.

Ranks tell each other in one small message per backward pass, sent behind the last bucket, which
parameters had a gradient. It is needed only where this rank had none.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.parallel.buckets import BucketPlan, reducible_gradient, view_like
from paceline.parallel.ranks.reduce_scatter import ReduceScatter, start_reduce_scatter
from paceline.parallel.zero.flat_parameters import FlatParameters, Shard


class UsedParameters:
    """Which parameters any rank had a gradient for.

    Args:
        num_parameters: How many are trained.
        device: Where to communicate from.
    """

    def __init__(self, num_parameters: int, device: torch.device) -> None:
        self._counts = torch.ones(num_parameters, device=device)
        self._work: dist.Work | None = None

    def note_missing(self, parameter: int) -> None:
        """Notes that this rank has no gradient for a parameter."""
        self._counts[parameter] = 0

    def start(self, group: dist.ProcessGroup) -> None:
        """Starts to count over the ranks."""
        self._work = dist.all_reduce(self._counts, group=group, async_op=True)

    def finish(self, asked: Sequence[int]) -> list[bool]:
        """Waits, returns whether any rank had a gradient for each of these, and starts anew."""
        assert self._work is not None
        self._work.wait()
        self._work = None
        answers = [bool(count) for count in self._counts[list(asked)].tolist()] if asked else []
        self._counts.fill_(1)
        return answers


class ShardedBucket:
    """A bucket that is reduce-scattered.

    Args:
        plan: What it holds.
        flat: Its parameters, sharded over the ranks.
        used: Which parameters any rank had a gradient for.
        message_dtype: What is sent.
        shard_group: Returns the ranks that hold the shards.
        when_landed: Called when the message has arrived.
        is_last: Whether the counts of `used` are sent behind it.
    """

    is_received_early = True
    """Whether a message has memory of its own, which is freed when it has arrived."""

    def __init__(
        self,
        plan: BucketPlan,
        flat: FlatParameters,
        used: UsedParameters,
        *,
        message_dtype: torch.dtype,
        shard_group: Callable[[], dist.ProcessGroup],
        when_landed: Callable[["ShardedBucket"], None],
        is_last: bool,
    ) -> None:
        self.plan = plan
        self.flat = flat
        self.parameters = flat.parameters
        self._dtypes = [parameter.dtype for parameter in flat.parameters]
        self._used = used
        self._message_dtype = message_dtype
        self._shard_group = shard_group
        self._when_landed = when_landed
        self._is_last = is_last
        self._buffer: Tensor | None = None
        self._views: list[Tensor] = []
        self._missing: dict[nn.Parameter, int] = {}
        """Parameters that this rank has no gradient for, and their places among all."""
        self._reduce_scatter: ReduceScatter | None = None
        self.gradient = torch.zeros_like(flat.master)
        """Gradient of this rank's shard, averaged over the ranks."""

    def keep(self, position: int) -> None:
        """Leaves a gradient where it is, because it is not to be sent yet."""
        self._gradient(position)

    def take(self, position: int, weight: float) -> bool:
        """Moves a gradient into the message, multiplied by the weight."""
        gradient = self._gradient(position)
        if self._buffer is None:
            self._open()
        view = self._views[position]
        if view.dtype.itemsize > gradient.dtype.itemsize:
            view.copy_(gradient).mul_(weight)  # Scaled in the wider dtype, nothing is lost.
        else:
            torch.mul(gradient, weight, out=view)
        self.parameters[position].grad = None
        return True

    def pack(self, scaled: set[int], weight: float) -> Tensor:
        """Returns the message, with zeros for what is missing."""
        if self._buffer is None:
            self._open()
        for position, parameter in enumerate(self.parameters):
            if position in scaled:
                continue
            if parameter.grad is None:
                self._views[position].zero_()
                self._missing[parameter] = self.plan.slots[position].tensor
                self._used.note_missing(self._missing[parameter])
            else:
                self.take(position, weight)
        assert self._buffer is not None
        return self._buffer

    def start(self, message: Tensor, group: dist.ProcessGroup) -> ReduceScatter:
        """Starts the reduce-scatter."""
        self._reduce_scatter = start_reduce_scatter(message, self._shard_group())
        if self._is_last:
            self._used.start(group)
        return self._reduce_scatter

    def unpack(self, _message: Tensor) -> None:
        """Has this rank's shard of the sum taken in, and the message freed."""
        self._when_landed(self)

    def add_sum_to(self, target: Tensor, *, overwrite: bool) -> None:
        """Adds what has arrived for this rank's shard to a tensor, and frees the message."""
        assert self._reduce_scatter is not None
        self._reduce_scatter.add_to(target, overwrite=overwrite)
        self._reduce_scatter = self._buffer = None
        self._views = []

    def zero_what_has_no_gradient(self) -> None:
        """Clears the shard's gradient where no earlier pass has left one."""
        for shard in self.flat.shards:
            if shard.tensor.grad is None:
                self._gradient_of(shard).zero_()

    def give_gradients(self) -> dict[Shard, int]:
        """Gives shards their gradients.

        Returns those for which this rank itself had none, and their parameters' places among all.
        """
        undecided = {}
        for shard in self.flat.shards:
            if shard.parameter in self._missing:
                undecided[shard] = self._missing[shard.parameter]
            else:
                self.give_gradient(shard)
        self._missing = {}
        return undecided

    def give_gradient(self, shard: Shard) -> None:
        """Gives a shard its gradient."""
        shard.tensor.grad = self._gradient_of(shard)

    def _gradient_of(self, shard: Shard) -> Tensor:
        begin = self.flat.offset_of(shard)
        return self.gradient[begin : begin + shard.end - shard.start]

    @property
    def is_accumulating(self) -> bool:
        """Whether shards have gradients of an earlier pass, to which this one's are added."""
        return any(shard.tensor.grad is not None for shard in self.flat.shards)

    def _gradient(self, position: int) -> Tensor:
        return reducible_gradient(
            self.parameters[position],
            self.flat.names[position],
            self._dtypes[position],
            self.plan.device,
        )

    def _open(self) -> None:
        num_elements = self.flat.layout.num_elements
        self._buffer = torch.empty(num_elements, dtype=self._message_dtype, device=self.plan.device)
        self._views = [
            view_like(parameter, slot.piece_of(self._buffer))
            for slot, parameter in zip(self.plan.slots, self.parameters, strict=True)
        ]
