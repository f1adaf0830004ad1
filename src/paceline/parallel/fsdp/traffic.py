"""What a rank has sent and waited for since its last synchronisation: one record for all layers."""

import dataclasses
import math

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


class Traffic:
    """Messages of gradients, and waits for these and for parameters.

    On a GPU times need events, which are recorded only if somebody has asked for statistics.

    Args:
        device: Whose time counts.
        sync_state: Whether somebody has.
    """

    def __init__(self, device: torch.device, sync_state: SyncState) -> None:
        self._device = device
        self._sync_state = sync_state
        self._started: Moment = math.nan
        self._over: Moment = math.nan
        self._messages: list[_Message] = []
        self._waits: list[tuple[Moment, Moment]] = []
        self._last: SynchronizationStats | None = None
        self._is_complete = False

    def begin_forward(self) -> None:
        """Begins a pass: what its layers wait for counts with the backward that follows."""
        if self._is_complete:
            self._messages, self._waits, self._is_complete = [], [], False

    def begin_backward(self) -> None:
        """Begins to count from the gradient of the output."""
        self.begin_forward()
        self._started = self._now()

    def end_backward(self) -> None:
        """Backward is over; what is waited for from here on is exposed in any case."""
        self._over = self._now()

    def complete(self) -> None:
        """All gradients have been received."""
        self._is_complete = True

    def sent(self, num_bytes: int, num_parameters: int) -> None:
        """Counts a message of gradients."""
        moment = self._now()
        self._messages.append(
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
        before = self._now()
        with named_range(WAIT):
            pending.wait()
        after = self._now()
        self._waits.append((before, after))
        if message is not None:
            self._messages[message].finished = after

    def _now(self) -> Moment:
        keeps_time = self._device.type != "cuda" or self._sync_state.records_statistics
        return now(self._device) if keeps_time else math.nan

    @property
    def num_messages(self) -> int:
        """How many messages of gradients were sent in this pass."""
        return len(self._messages)

    def stats(self) -> SynchronizationStats | None:
        """Returns what is known of the last synchronisation; None before the first."""
        if self._is_complete:
            self._last = SynchronizationStats(
                buckets=tuple(
                    BucketStats(
                        num_bytes=message.num_bytes,
                        num_parameters=message.num_parameters,
                        launch_s=seconds_between(self._started, message.launched),
                        finish_s=seconds_between(self._started, message.finished),
                    )
                    for message in self._messages
                ),
                backward_s=seconds_between(self._started, self._over),
                exposed_wait_s=sum(seconds_between(*wait) for wait in self._waits),
            )
        return self._last
