"""One backward pass and its communication: what is known while it lasts, and what remains."""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.parallel.ranks.device_clock import Moment, now, seconds_between
from paceline.parallel.ranks.pending import Pending
from paceline.parallel.ranks.rank_weight import RankWeight

AnyWork: TypeAlias = dist.Work | Pending

OUTSIDE_BACKWARD = -1
"""What `current_pass` returns where no backward pass is going on."""

current_pass: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the autograd engine's number for the innermost backward pass that is going on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BucketStats:
    """One bucket of the last synchronisation; seconds from the start of backward."""

    num_bytes: int
    num_parameters: int
    launch_s: float
    finish_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class SynchronizationStats:
    """The last synchronisation on this rank."""

    buckets: tuple[BucketStats, ...]
    """Each bucket's size, launch and finish, in the order of the plan."""
    backward_s: float
    """From the gradient of the module's output to the end of backward."""
    exposed_wait_s: float | None
    """From the end of backward to the end of the last all-reduce. Where parameters travel too, all
    waits of the step; None where waits cannot be seen, as those of torch's FSDP2 on a GPU."""


class RunTimes:
    """The moments of a pass, for those who ask for them.

    Args:
        device: Whose time line they are on.
        num_buckets: How many messages there will be.
    """

    def __init__(self, device: torch.device, num_buckets: int) -> None:
        self._device = device
        self.started = self.backward_over = self.all_received = now(device)
        self.arrivals: dict[int, Moment] = {}
        """When each parameter's gradient was complete."""
        self._launched: list[Moment] = []
        self._finished: list[Moment | None] = [None] * num_buckets

    def launch(self) -> None:
        """Notes that the next message is about to start."""
        self._launched.append(now(self._device))

    def watch(self, number: int, work: AnyWork, side_stream: torch.cuda.Stream | None) -> None:
        """Has the end of a message noted when it comes, without asking for it again and again.

        Args:
            number: The message.
            work: What it is waited for by.
            side_stream: On a GPU, a stream in which nothing else is held up by waiting.
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
        """Notes that a message has been waited for, in case its end was not told."""
        if self._finished[number] is None:
            self._finish(number)

    def _finish(self, number: int) -> None:
        self._finished[number] = now(self._device)

    def arrivals_s(self, num_parameters: int) -> list[float]:
        """Returns when each gradient arrived; one that did not is sent when backward is over."""
        return [
            seconds_between(self.started, self.arrivals.get(index, self.backward_over))
            for index in range(num_parameters)
        ]

    def stats(self, lengths: Sequence[int], sizes: Sequence[int]) -> SynchronizationStats:
        """Returns times and sizes, once all is received.

        Args:
            lengths: How many parameters each bucket has.
            sizes: Each message's bytes.
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
        task: The autograd engine's number for the pass.
        bucket_lengths: How many parameters each bucket has.
        times: Where its moments are kept, if anybody wants them.
    """

    def __init__(self, *, task: int, bucket_lengths: Sequence[int], times: RunTimes | None) -> None:
        self.task = task
        self.times = times
        self.average = False
        """Whether the pass is to be averaged if it completes a gradient."""
        self.weight: RankWeight | None = None
        """Weight of this rank's gradients in the average; None while they are not averaged."""
        self.is_complete = bytearray(sum(bucket_lengths))
        """Parameters that this pass itself has completed, not one inside it."""
        self.num_left = list(bucket_lengths)
        """How many gradients of each bucket are not complete."""
        self.waiting: list[list[int]] = [[] for _ in bucket_lengths]
        """Positions in each bucket whose gradients are complete and not moved yet."""
        self.waiting_bytes = [0] * len(bucket_lengths)
        self.taken: list[set[int]] = [set() for _ in bucket_lengths]
        """Positions in each bucket whose gradients are in the message, multiplied by the weight."""
        self.in_flight: collections.deque[tuple[Tensor, AnyWork]] = collections.deque()
        self.num_received = 0
        self.message_bytes: list[int] = []
        """Of the messages that were sent, in the order of the buckets."""
