"""ZeRO-2 whose gradients are sent in 8 or 4 bits, and whose parameters follow their masters in 8.

1. Gradients: a packed reduce-scatter leaves each rank the float32 sum of its shard; what a message
   leaves out of a rank's gradients is added to the next one's.
2. The optimizer updates the master of the rank's shard, which no other rank has.
3. Parameters: each rank sends how far its master is from the parameters that all ranks have, in 8
   bits, and all ranks, itself included, add what they unpack. All ranks keep equal parameters. What
   a message leaves out is still between master and parameters, and so part of the next one.
"""

import itertools
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.parallel.buckets import BucketPlan
from paceline.parallel.compression.codec import CodeName
from paceline.parallel.compression.packed import PackedAllGather, PackedReduceScatter
from paceline.parallel.compression.queue import CompressedQueue
from paceline.parallel.compression.residual import Residual, left_of_gradients
from paceline.parallel.ranks.collectives import ReduceScatter
from paceline.parallel.ranks.pending import Pending
from paceline.parallel.zero.bucket import ShardedBucket, ShardedParameters
from paceline.parallel.zero.flat_parameters import FlatParameters, Partition, ShardLayout


class CompressedFlatParameters(FlatParameters):
    """Flat parameters whose changes are sent in 8 bits.

    Args:
        layout: The flat tensor and the ranks' shards of it.
        parameters: All parameters, which the layout indexes.
        names: Their names.
        rank: This rank's number.
        master_dtype: The dtype of the shards that the optimizer updates.
        queue: Runs the compressed collectives of the container.
    """

    def __init__(
        self,
        layout: ShardLayout,
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        *,
        rank: int,
        master_dtype: torch.dtype | None,
        queue: CompressedQueue,
    ) -> None:
        super().__init__(
            layout,
            parameters,
            names,
            rank=rank,
            partition=Partition.ELEMENTS,
            master_dtype=master_dtype,
            keeps_master=True,
        )
        self._queue = queue
        self._gather = PackedAllGather(pieces_of(layout), rank=rank, device=layout.device)

    def _send(self, _group: dist.ProcessGroup) -> Pending:
        work = self._queue.start(self._follow_masters)
        num_bytes = self._gather.message_bytes
        return Pending("compressed all-gather", num_bytes, [work], self.layout.device, direct=True)

    def _follow_masters(self, group: dist.ProcessGroup) -> None:
        """Moves all ranks' parameters towards their masters."""
        distance = (self.master - self.local_shard).float()
        nothing = torch.zeros_like(distance)
        numbers = self.buffer.float()  # The buffer itself, if it is float32.
        self._gather.run(distance, nothing, numbers, group, adds=True)
        if numbers is not self.buffer:
            self.buffer.copy_(numbers)


class CompressedShardedBucket(ShardedBucket):
    """A bucket whose reduce-scatter is packed.

    Args:
        plan: The layout of the bucket.
        flat: Its parameters.
        shared: All parameters of the container.
        code: How gradients are packed.
        queue: Runs the compressed collectives of the container.
        rank: This rank's number.
        sends_counts: Whether its message is the last of a pass.
    """

    def __init__(
        self,
        plan: BucketPlan,
        flat: FlatParameters,
        shared: ShardedParameters,
        *,
        code: CodeName,
        queue: CompressedQueue,
        rank: int,
        sends_counts: bool,
    ) -> None:
        super().__init__(plan, flat, shared, message_dtype=torch.float32, sends_counts=sends_counts)
        self._queue = queue
        self._own = pieces_of(flat.layout)[rank]
        self._packed = PackedReduceScatter(
            pieces_of(flat.layout), 0, code, rank=rank, device=plan.device
        )

    def residuals(self) -> Iterator[Residual]:
        """Yields what this rank's messages have left out of its gradients, by parameter."""
        return left_of_gradients(self.plan.slots, self.names, self._packed.left_out)

    def sent_bytes(self, _message: Tensor) -> int:
        """Returns the size of the packed message."""
        return self._packed.message_bytes

    def _send(self, message: Tensor, _group: dist.ProcessGroup) -> ReduceScatter:
        def reduce_scatter(group: dist.ProcessGroup) -> None:
            self._packed.run(message, None, group)

        work = self._queue.start(reduce_scatter)
        return ReduceScatter(message, [message[self._own]], [work], direct=True)


def pieces_of(layout: ShardLayout) -> list[slice]:
    """Returns the ranks' shards of a flat tensor."""
    return [slice(*borders) for borders in itertools.pairwise(layout.borders)]
