"""How a container sends gradients, and what its user wants of the next pass."""

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
    """All together, when backward is over."""
    ONE_BY_ONE = enum.auto()
    """When backward is over, each when the one before it has ended."""


@dataclasses.dataclass(kw_only=True)
class SyncState:
    """What the container's user wants of the next pass; outlives the synchroniser."""

    synchronize: bool = True
    """Whether passes are averaged now."""
    forward_synchronizes: bool = True
    """Whether they were when the last forward pass ran."""
    forward_is_pending: bool = False
    """Whether a forward pass that is to be averaged was not followed by its averages yet."""
    pending_weight: tuple[float, Tensor, dist.Work] | None = None
    """This rank's weight, the sum over the ranks, and what to wait for before using it."""
    records_statistics: bool = False
    """Whether the moments of a pass are kept: events on a GPU, looks at the clock on a CPU."""

    def take_weight(self, num_ranks: int) -> RankWeight | None:
        """Returns what this rank counts for in the average of one pass; None if all count alike."""
        if self.pending_weight is None:
            return None
        own, total, work = self.pending_weight
        self.pending_weight = None
        work.wait()
        return RankWeight.of(own, total, num_ranks)


class GroupReference:
    """Knows a process group without keeping it alive.

    Whatever is left over when a group is destroyed must not keep it: its threads would then end
    with the interpreter, which sometimes aborts the process.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._reference = weakref.ref(group)

    def get(self) -> dist.ProcessGroup:
        """Returns the group; an error if it is gone."""
        group = self._reference()
        if group is None:
            raise UsageError(
                "the process group has been destroyed; create the containers that use it again"
            )
        return group


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How gradients are sent; the same on all ranks."""

    group_reference: GroupReference
    device: torch.device
    launch: LaunchPolicy
    reduction_dtype: torch.dtype | None
    """What the sums are computed and sent in; None for the gradients' own dtype."""

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks to average over."""
        return self.group_reference.get()
