"""What the synchroniser asks of a bucket, whatever becomes of the bucket's sum.

`paceline.parallel.buckets.Bucket` all-reduces it; `paceline.parallel.zero.bucket.ShardedBucket`
reduce-scatters it.
"""

from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist
from torch import Tensor, nn

from paceline.parallel.buckets import BucketPlan
from paceline.parallel.ranks.rank_weight import RankWeight
from paceline.parallel.reducer.backward_pass import AnyWork


class GradientBucket(Protocol):
    """Gradients that are sent in one message."""

    plan: BucketPlan
    """The bucket's tensors and their places."""
    is_received_early: bool
    """Whether a message has memory of its own, which is freed when it has arrived."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The parameters of the bucket, in the order of the plan."""

    def keep(self, position: int) -> None:
        """Takes note of a gradient that is not sent yet."""

    def take(self, positions: Sequence[int], weight: RankWeight) -> None:
        """Takes gradients in, multiplied by the weight."""

    def pack(self, taken: set[int], weight: RankWeight) -> Tensor:
        """Returns the message, with what was not taken in yet, and zeros for what is missing."""

    def start(self, message: Tensor, group: dist.ProcessGroup) -> AnyWork:
        """Starts the collective."""

    def unpack(self, message: Tensor) -> None:
        """Takes in the sum."""
