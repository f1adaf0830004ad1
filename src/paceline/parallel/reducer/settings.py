"""Settings of gradient synchronisation, and the user's requests for the next pass."""

import dataclasses
import enum
import weakref

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.core.errors import UsageError
from paceline.parallel.ranks.rank_weight import RankWeight


class LaunchPolicy(enum.Enum):
    """When a bucket's all-reduce starts."""

    WHEN_READY = enum.auto()
    """As soon as its gradients and all buckets before it are complete."""
    AFTER_BACKWARD = enum.auto()
    """All together after backward."""
    ONE_BY_ONE = enum.auto()
    """After backward, each when the previous one has completed."""


@dataclasses.dataclass(kw_only=True)
class SyncState:
    """The user's requests for the next pass; outlives the synchroniser."""

    synchronize: bool = True
    """Whether passes are currently averaged."""
    forward_synchronizes: bool = True
    """Value of `synchronize` during the last forward pass."""
    forward_is_pending: bool = False
    """Whether a forward pass that is to be averaged has not been averaged yet."""
    pending_weight: tuple[float, Tensor, dist.Work] | None = None
    """This rank's weight, the sum over the ranks, and the all-reduce that computes the sum."""
    records_statistics: bool = False
    """Whether timestamps of a pass are recorded: CUDA events on a GPU, clock reads on a CPU."""

    def take_weight(self, num_ranks: int) -> RankWeight | None:
        """Returns and clears this rank's weight for one pass; None if no weight was set."""
        if self.pending_weight is None:
            return None
        own, total, work = self.pending_weight
        self.pending_weight = None
        work.wait()
        return RankWeight.of(own, total, num_ranks)


class GroupReference:
    """A weak reference to a process group.

    Objects that outlive the destruction of a group must not keep it alive: its threads would then
    end with the interpreter, which sometimes aborts the process.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._reference = weakref.ref(group)

    def get(self) -> dist.ProcessGroup:
        """Returns the group; raises if it has been destroyed."""
        group = self._reference()
        if group is None:
            raise UsageError(
                "the process group has been destroyed; create the containers that use it again"
            )
        return group


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How gradients are sent; equal on all ranks."""

    group_reference: GroupReference
    device: torch.device
    launch: LaunchPolicy
    reduction_dtype: torch.dtype | None
    """The dtype in which gradients are summed and sent; None for the gradients' own dtype."""

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group over which gradients are averaged."""
        return self.group_reference.get()
