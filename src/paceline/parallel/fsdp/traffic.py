"""What a rank has sent and waited for since its last synchronisation: one record for all layers."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator

import torch

from paceline.core.ranges import WAIT
from paceline.kernels.named_range import named_range
from paceline.parallel.ranks.device_clock import Moment, now, seconds_between
from paceline.parallel.ranks.pending import Pending
from paceline.parallel.reducer.backward_pass import BucketStats, SynchronizationStats
from paceline.parallel.reducer.settings import SyncState


@dataclasses.dataclass(kw_only=True)
class _Message:
    num_bytes: int
    num_parameters: int
    launched: Moment
    finished: Moment


@dataclasses.dataclass(kw_only=True)
class _Step:
    """All passes up to one whose gradients are averaged."""

    keeps_time: bool
    started: Moment = math.nan
    over: Moment = math.nan
    messages: list[_Message] = dataclasses.field(default_factory=list)
    waits: list[tuple[Moment, Moment]] = dataclasses.field(default_factory=list)
    sees_waits: bool = True

    def stats(self) -> SynchronizationStats | None:
        """Returns sizes and times, if these were kept."""
        if not self.keeps_time:
            return None
        waited_s = sum(seconds_between(*wait) for wait in self.waits)
        return SynchronizationStats(
            buckets=tuple(
                BucketStats(
                    num_bytes=message.num_bytes,
                    num_parameters=message.num_parameters,
                    launch_s=seconds_between(self.started, message.launched),
                    finish_s=seconds_between(self.started, message.finished),
                )
                for message in self.messages
            ),
            backward_s=seconds_between(self.started, self.over),
            exposed_wait_s=waited_s if self.sees_waits else None,
        )


class Traffic:
    """Messages of gradients, and waits for these and for parameters.

    Sizes are always known, times only if somebody has asked for statistics.

    Args:
        device: Whose time counts.
        sync_state: Whether somebody has.
    """

    def __init__(self, device: torch.device, sync_state: SyncState) -> None:
        self._device = device
        self._sync_state = sync_state
        self._step = _Step(keeps_time=False)
        self._last: _Step | None = None
        self._belongs_to_step = False

    def begin_forward(self) -> None:
        """Begins a pass: what its layers wait for counts with the backward that follows, if any."""
        self._begin_pass(torch.is_grad_enabled())

    def begin_backward(self) -> None:
        """Begins to count from the gradient of the output."""
        self._begin_pass(True)
        self._step.started = self._now()

    def end_backward(self) -> None:
        """Backward is over; what is waited for from here on is exposed in any case."""
        self._step.over = self._now()

    def complete(self) -> None:
        """All gradients have been received."""
        self._last, self._step = self._step, _Step(keeps_time=False)

    def sent(self, num_bytes: int, num_parameters: int) -> None:
        """Counts a message of gradients."""
        moment = self._now()
        self._step.messages.append(
            _Message(
                num_bytes=num_bytes, num_parameters=num_parameters, launched=moment, finished=moment
            )
        )

    def wait(self, pending: Pending, message: int | None = None) -> None:
        """Makes the current stream wait, and counts for how long.

        Args:
            pending: What for.
            message: The number of a message of gradients.
        """
        with named_range(WAIT), self.waiting(message):
            pending.wait()

    @contextlib.contextmanager
    def waiting(self, message: int | None = None) -> Iterator[None]:
        """Counts what is inside as a wait.

        Args:
            message: The number of a message of gradients that has arrived when it is over.
        """
        before = self._now()
        yield
        step = self._step
        if step.keeps_time and self._belongs_to_step:
            step.waits.append((before, self._now()))
            if message is not None:
                step.messages[message].finished = step.waits[-1][1]

    def lose_sight_of_waits(self) -> None:
        """Somebody waits elsewhere in this step, so that the sum of the waits is unknown."""
        self._step.sees_waits = False

    def _begin_pass(self, belongs_to_step: bool) -> None:
        self._belongs_to_step = belongs_to_step
        if not (self._step.messages or self._step.waits):
            self._step.keeps_time = self._sync_state.records_statistics

    def _now(self) -> Moment:
        return now(self._device) if self._step.keeps_time else math.nan

    @property
    def num_messages(self) -> int:
        """How many messages of gradients were sent in this step."""
        return len(self._step.messages)

    def message_bytes(self) -> list[int]:
        """Returns the size of each message of gradients in the last synchronisation."""
        return [] if self._last is None else [m.num_bytes for m in self._last.messages]

    def stats(self) -> SynchronizationStats | None:
        """Returns what is known of the last synchronisation; None before the first."""
        return None if self._last is None else self._last.stats()
