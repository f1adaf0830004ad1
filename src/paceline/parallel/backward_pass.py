"""State of one backward pass and its communication, and the statistics that remain of it.

Settings of gradient synchronisation, and the user's requests for the next pass.
"""

import collections
import dataclasses
import enum
import weakref
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.core.errors import UsageError
from paceline.parallel.buckets import RankWeight
from paceline.parallel.ranks.device_clock import Moment, now, seconds_between
from paceline.parallel.ranks.pending import Pending

AnyWork: TypeAlias = dist.Work | Pending

OUTSIDE_BACKWARD = -1
"""Returned by `current_pass` outside of backward."""

current_pass: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the autograd engine's ID of the innermost current backward pass."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BucketStats:
    """One bucket of a synchronisation; times are seconds since the start of backward."""

    num_bytes: int
    num_parameters: int
    launch_s: float
    finish_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class SynchronizationStats:
    """Statistics of the last synchronisation on this rank."""

    buckets: tuple[BucketStats, ...]
    """Each bucket's size, launch and finish, in plan order."""
    backward_s: float
    """From the gradient of the module's output to the end of backward."""
    exposed_wait_s: float | None
    """Time from the end of backward to the end of the last collective. If parameters are gathered
    too, the sum of all waits of the step. None if waits are not observable, as in torch's FSDP2 on
    a GPU."""


class RunTimes:
    """Timestamps of a pass, recorded on request.

    Args:
        device: The device on whose timeline they are taken.
        num_buckets: Number of messages in the pass.
    """

    def __init__(self, device: torch.device, num_buckets: int) -> None:
        self._device = device
        self.started = self.backward_over = self.all_received = now(device)
        self.arrivals: dict[int, Moment] = {}
        """Completion time of each parameter's gradient, by index."""
        self._launched: list[Moment] = []
        self._finished: list[Moment | None] = [None] * num_buckets

    def launch(self) -> None:
        """Records the launch of the next message."""
        self._launched.append(now(self._device))

    def watch(self, number: int, work: AnyWork, side_stream: torch.cuda.Stream | None) -> None:
        """Arranges for the completion time of a message to be recorded, without polling.

        Args:
            number: Index of the message.
            work: Handle of its collective.
            side_stream: On a GPU, a separate stream, where waiting delays no other work.
        """
        if side_stream is not None:
            with torch.cuda.stream(side_stream):
                work.wait()
                self._finished[number] = now(self._device)
        elif isinstance(work, Pending):
            work.when_over(lambda: self._finish(number))
        else:
            work.get_future().add_done_callback(lambda _: self._finish(number))

    def receive(self, number: int) -> None:
        """Records that a message has been waited for, unless its completion is already recorded."""
        if self._finished[number] is None:
            self._finish(number)

    def _finish(self, number: int) -> None:
        self._finished[number] = now(self._device)

    def arrivals_s(self, num_parameters: int) -> list[float]:
        """Returns each gradient's arrival time; the end of backward for one that did not arrive."""
        return [
            seconds_between(self.started, self.arrivals.get(index, self.backward_over))
            for index in range(num_parameters)
        ]

    def stats(self, lengths: Sequence[int], sizes: Sequence[int]) -> SynchronizationStats:
        """Returns times and sizes; call after all messages have been received.

        Args:
            lengths: Number of parameters of each bucket.
            sizes: Bytes of each message.
        """
        return SynchronizationStats(
            buckets=tuple(
                BucketStats(
                    num_bytes=num_bytes,
                    num_parameters=length,
                    launch_s=seconds_between(self.started, launched),
                    finish_s=seconds_between(self.started, finished or self.all_received),
                )
                for length, num_bytes, launched, finished in zip(
                    lengths, sizes, self._launched, self._finished, strict=True
                )
            ),
            backward_s=seconds_between(self.started, self.backward_over),
            exposed_wait_s=seconds_between(self.backward_over, self.all_received),
        )


class BackwardRun:
    """A backward pass, from the gradient of its output to the end of its communication.

    Args:
        task: The autograd engine's ID of the pass.
        bucket_lengths: Number of parameters of each bucket.
        times: Receives the timestamps of the pass; None if they are not recorded.
    """

    def __init__(self, *, task: int, bucket_lengths: Sequence[int], times: RunTimes | None) -> None:
        self.task = task
        self.times = times
        self.average = False
        """Whether to average the pass if it completes a gradient."""
        self.weight: RankWeight | None = None
        """Weight of this rank's gradients in the average; None while they are not averaged."""
        self.is_complete = bytearray(sum(bucket_lengths))
        """Parameters completed by this pass itself, excluding backward passes nested in it."""
        self.num_left = list(bucket_lengths)
        """Number of incomplete gradients of each bucket."""
        self.waiting: list[list[int]] = [[] for _ in bucket_lengths]
        """Positions in each bucket whose gradients are complete but not yet moved into it."""
        self.waiting_bytes = [0] * len(bucket_lengths)
        self.taken: list[set[int]] = [set() for _ in bucket_lengths]
        """Positions in each bucket whose gradients were moved into it by `GradientBucket.take`."""
        self.in_flight: collections.deque[tuple[Tensor, AnyWork]] = collections.deque()
        self.num_received = 0
        self.message_bytes: list[int] = []
        """Bytes of the messages sent so far, in bucket order."""


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
