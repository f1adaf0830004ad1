"""Buckets of gradients whose average is packed in 8 or 4 bits."""

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.parallel.buckets import Bucket, BucketPlan
from paceline.parallel.compression.average import CompressedAverage
from paceline.parallel.compression.codec import CodeName
from paceline.parallel.compression.queue import CompressedQueue
from paceline.parallel.compression.residual import Residual, left_of_gradients, left_of_sums
from paceline.parallel.ranks.pending import Pending


class CompressedBucket(Bucket):
    """A bucket whose gradients are summed by a `CompressedAverage`.

    Args:
        plan: The layout of the bucket.
        parameters: All trained parameters, which the plan indexes.
        names: Their names.
        outward: How each rank's gradients are packed.
        queue: Runs the compressed collectives of the container.
        group: The ranks that average.
        left_out: What messages of earlier buckets have left out of parameters' gradients.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        *,
        outward: CodeName,
        queue: CompressedQueue,
        group: dist.ProcessGroup,
        left_out: Mapping[nn.Parameter, Tensor],
    ) -> None:
        super().__init__(plan, parameters, names, None)
        self._queue = queue
        self._average = CompressedAverage(
            plan.num_elements,
            len(plan.slots),
            outward,
            num_ranks=dist.get_world_size(group),
            rank=dist.get_rank(group),
            device=plan.device,
        )
        for slot, parameter in zip(plan.slots, self.parameters, strict=True):
            if parameter in left_out:
                slot.piece_of(self._average.left_out).copy_(left_out[parameter])

    def start(self, message: Tensor, group: dist.ProcessGroup) -> Pending:
        """Starts the average of the ranks' buffers, which replaces their contents."""
        work = self._queue.start(self._run)
        num_bytes = self._average.message_bytes
        return Pending("compressed average", num_bytes, [work], self.plan.device, direct=True)

    def sent_bytes(self, message: Tensor) -> int:
        """Returns the mean size of the average's two messages."""
        return self._average.message_bytes

    def left_out(self) -> dict[nn.Parameter, Tensor]:
        """Returns what this rank's messages have left out of each parameter's gradients."""
        left_out = self._average.all_left_out()
        return {
            parameter: slot.piece_of(left_out)
            for slot, parameter in zip(self.plan.slots, self.parameters, strict=True)
        }

    def residuals(self) -> Iterator[Residual]:
        """Yields what this rank's messages have left out, by parameter."""
        average, slots = self._average, self.plan.slots
        yield from left_of_gradients(slots, self.names, average.left_out)
        yield from left_of_sums(slots, self.names, average.left_back, average.own)

    def _run(self, group: dist.ProcessGroup) -> None:
        gradients, flags = self.buffer[: self.plan.num_elements], self._used
        numbers = gradients.to(torch.float32)
        self._average.run(numbers, flags, group)
        if numbers is not gradients:
            gradients.copy_(numbers)
