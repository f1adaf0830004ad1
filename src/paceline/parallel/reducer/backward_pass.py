"""One backward pass and its communication: what is known while it lasts, and what remains."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.parallel.ranks.device_clock import Moment, seconds_between
from paceline.parallel.ranks.pending import Pending

AnyWork: TypeAlias = dist.Work | Pending

OUTSIDE_BACKWARD = -1
"""What `current_pass` returns where no backward pass is going on."""


def current_pass() -> int:
    """Returns the autograd engine's number for the innermost backward pass that is going on."""
    return torch._C._current_graph_task_id()


@dataclasses.dataclass(frozen=True, kw_only=True)
class BucketStats:
    """One bucket of the last synchronisation; seconds from the start of backward."""

    num_bytes: int
    num_parameters: int
    launch_s: float
    finish_s: float
    """On a CPU, when it was first seen to have ended: at the next gradient, or in the end."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SynchronizationStats:
    """The last synchronisation on this rank."""

    buckets: tuple[BucketStats, ...]
    """Each bucket's size, launch and finish, in the order of the plan."""
    backward_s: float
    """From the gradient of the module's output to the end of backward."""
    exposed_wait_s: float
    """From the end of backward to the end of the last all-reduce."""


class BackwardRun:
    """A backward pass, from the gradient of its output to the end of its communication.

    Args:
        task: The autograd engine's number for the pass.
        num_buckets: How many messages there will be.
        started: When it began, on the device's time line.
    """

    def __init__(self, *, task: int, num_buckets: int, started: Moment) -> None:
        self.task = task
        self.average = False
        """Whether the pass is to be averaged if it completes a gradient."""
        self.weight: float | None = None
        """Factor of this rank's gradients in the average; None while they are not averaged."""
        self.complete: set[int] = set()
        """Parameters that this pass itself has completed, not one inside it."""
        self.num_complete = [0] * num_buckets
        self.scaled: list[set[int]] = [set() for _ in range(num_buckets)]
        """Positions in each bucket whose gradient is multiplied by the weight already."""
        self.in_flight: collections.deque[tuple[Tensor, AnyWork]] = collections.deque()
        self.num_received = 0
        self.num_seen_finished = 0
        self.message_bytes: list[int] = []
        """Of the messages that were sent, in the order of the buckets."""
        self.started = self.backward_over = self.all_received = started
        self.arrivals: dict[int, Moment] = {}
        self.launched: list[Moment] = []
        self.finished: list[Moment] = [started] * num_buckets

    def stats(self, bucket_lengths: Sequence[int]) -> SynchronizationStats:
        """Returns times and sizes, once all is received."""
        return SynchronizationStats(
            buckets=tuple(
                BucketStats(
                    num_bytes=num_bytes,
                    num_parameters=length,
                    launch_s=seconds_between(self.started, launched),
                    finish_s=seconds_between(self.started, finished),
                )
                for length, num_bytes, launched, finished in zip(
                    bucket_lengths, self.message_bytes, self.launched, self.finished, strict=True
                )
            ),
            backward_s=seconds_between(self.started, self.backward_over),
            exposed_wait_s=seconds_between(self.backward_over, self.all_received),
        )
