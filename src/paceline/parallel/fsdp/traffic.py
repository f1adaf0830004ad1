"""Record of a rank's gradient messages and waits since its last synchronisation, for all layers."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator

import torch

from paceline.core.ranges import WAIT
from paceline.kernels.named_range import named_range
from paceline.parallel.backward_pass import BucketStats, SynchronizationStats, SyncState
from paceline.parallel.ranks.device_clock import Moment, now, seconds_between
from paceline.parallel.ranks.pending import Pending


@dataclasses.dataclass(kw_only=True)
class _Message:
    num_bytes: int
    num_parameters: int
    launched: Moment
    finished: Moment


@dataclasses.dataclass(kw_only=True)
class _Step:
    """All passes up to and including one whose gradients are averaged."""

    keeps_time: bool
    started: Moment = math.nan
    over: Moment = math.nan
    messages: list[_Message] = dataclasses.field(default_factory=list)
    waits: list[tuple[Moment, Moment]] = dataclasses.field(default_factory=list)
    sees_waits: bool = True

    def stats(self) -> SynchronizationStats | None:
        """Returns sizes and times, or None if times were not recorded."""
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
    """Records gradient messages, and waits for gradients and parameters.

    Sizes are always recorded, times only if statistics are requested.

    Args:
        device: The device on whose timeline times are taken.
        sync_state: Whether statistics are requested.
    """

    def __init__(self, device: torch.device, sync_state: SyncState) -> None:
        self._device = device
        self._sync_state = sync_state
        self._step = _Step(keeps_time=False)
        self._last: _Step | None = None
        self._belongs_to_step = False

    def begin_forward(self) -> None:
        """Begins a forward pass; its waits count towards the backward that follows, if any."""
        self._begin_pass(torch.is_grad_enabled())

    def begin_backward(self) -> None:
        """Records the start of backward: the arrival of the output's gradient."""
        self._begin_pass(True)
        self._step.started = self._now()

    def end_backward(self) -> None:
        """Records the end of backward; all later waits are exposed."""
        self._step.over = self._now()

    def complete(self) -> None:
        """Completes the step, after all gradients have been received."""
        self._last, self._step = self._step, _Step(keeps_time=False)

    def sent(self, num_bytes: int, num_parameters: int) -> None:
        """Records a gradient message that was sent."""
        moment = self._now()
        self._step.messages.append(
            _Message(
                num_bytes=num_bytes, num_parameters=num_parameters, launched=moment, finished=moment
            )
        )

    def wait(self, pending: Pending, message: int | None = None) -> None:
        """Makes the current stream wait, and records the wait.

        Args:
            pending: The operation to wait for.
            message: Index of the gradient message, if it is one.
        """
        with named_range(WAIT), self.waiting(message):
            pending.wait()

    @contextlib.contextmanager
    def waiting(self, message: int | None = None) -> Iterator[None]:
        """Records the time inside the context as a wait.

        Args:
            message: Index of the gradient message that has arrived at the end, if any.
        """
        before = self._now()
        yield
        step = self._step
        if step.keeps_time and self._belongs_to_step:
            step.waits.append((before, self._now()))
            if message is not None:
                step.messages[message].finished = step.waits[-1][1]

    def lose_sight_of_waits(self) -> None:
        """Marks the total wait of this step as unknown, because some waits are not observable."""
        self._step.sees_waits = False

    def _begin_pass(self, belongs_to_step: bool) -> None:
        self._belongs_to_step = belongs_to_step
        if not (self._step.messages or self._step.waits):
            self._step.keeps_time = self._sync_state.records_statistics

    def _now(self) -> Moment:
        return now(self._device) if self._step.keeps_time else math.nan

    @property
    def num_messages(self) -> int:
        """Number of gradient messages sent in this step."""
        return len(self._step.messages)

    def message_bytes(self) -> list[int]:
        """Returns the size of each gradient message in the last synchronisation."""
        return [] if self._last is None else [m.num_bytes for m in self._last.messages]

    def stats(self) -> SynchronizationStats | None:
        """Returns statistics of the last synchronisation; None if there is none or no times."""
        return None if self._last is None else self._last.stats()
