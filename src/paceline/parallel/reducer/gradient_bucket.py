"""The interface between the synchroniser and buckets.

`paceline.parallel.buckets.Bucket` all-reduces its gradients;
`paceline.parallel.zero.bucket.ShardedBucket` reduce-scatters them.
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
    """The bucket's tensors and their positions."""
    is_received_early: bool
    """Whether messages use separate memory, which is freed when they have been received."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The parameters of the bucket, in the order of the plan."""

    def keep(self, position: int) -> None:
        """Accepts a gradient that is not sent in this pass."""

    def take(self, positions: Sequence[int], weight: RankWeight) -> None:
        """Moves gradients into the bucket, scaled by the weight."""

    def pack(self, taken: set[int], weight: RankWeight) -> Tensor:
        """Returns the message, after taking the remaining gradients and zeros for missing ones."""

    def start(self, message: Tensor, group: dist.ProcessGroup) -> AnyWork:
        """Starts the collective."""

    def unpack(self, message: Tensor) -> None:
        """Stores the reduced message."""
