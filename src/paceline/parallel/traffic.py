"""The messages and waits of a step on this rank, with their times on the device's timeline.

`RunTimes` observes one backward pass of containers whose ranks hold all parameters; `Traffic`
observes steps that also gather parameters, Paceline's and torch's.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator

import torch
import torch.distributed as dist

from paceline.core.ranges import WAIT
from paceline.devices.accelerator import Moment, now, seconds_between
from paceline.devices.named_range import named_range
from paceline.parallel.ranks.pending import Pending


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


@dataclasses.dataclass(kw_only=True)
class _Message:
    num_bytes: int
    num_parameters: int
    launched: Moment
    finished: Moment | None = None

    def stats(self, started: Moment) -> BucketStats:
        assert self.finished is not None
        return BucketStats(
            num_bytes=self.num_bytes,
            num_parameters=self.num_parameters,
            launch_s=seconds_between(started, self.launched),
            finish_s=seconds_between(started, self.finished),
        )


class RunTimes:
    """Timestamps of a backward pass and its messages, recorded on request."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.started = self.backward_over = self.all_received = now(device)
        self.arrivals: dict[int, Moment] = {}
        """Completion time of each parameter's gradient, by index."""
        self._messages: list[_Message] = []

    def launch(self, num_bytes: int, num_parameters: int) -> None:
        """Records the launch of the next message."""
        self._messages.append(
            _Message(num_bytes=num_bytes, num_parameters=num_parameters, launched=now(self._device))
        )

    def watch(self, work: dist.Work | Pending, side_stream: torch.Stream | None) -> None:
        """Arranges for the completion time of the last message to be recorded, without polling.

        On an accelerator, the side stream waits for it, which delays no other work.
        """
        message = self._messages[-1]
        if side_stream is not None:
            with side_stream:
                work.wait()
                self._finish(message)
        elif isinstance(work, Pending):
            work.when_over(lambda: self._finish(message))
        else:
            work.get_future().add_done_callback(lambda _: self._finish(message))

    def receive(self, number: int) -> None:
        """Records that a message has been waited for, unless its completion is already recorded."""
        if self._messages[number].finished is None:
            self._finish(self._messages[number])

    def _finish(self, message: _Message) -> None:
        message.finished = now(self._device)

    def arrivals_s(self, num_parameters: int) -> list[float]:
        """Returns each gradient's arrival time; the end of backward for one that did not arrive."""
        return [
            seconds_between(self.started, self.arrivals.get(index, self.backward_over))
            for index in range(num_parameters)
        ]

    def stats(self) -> SynchronizationStats:
        """Returns sizes and times of the messages; call after all were received."""
        return SynchronizationStats(
            buckets=tuple(message.stats(self.started) for message in self._messages),
            backward_s=seconds_between(self.started, self.backward_over),
            exposed_wait_s=seconds_between(self.backward_over, self.all_received),
        )


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
            buckets=tuple(message.stats(self.started) for message in self.messages),
            backward_s=seconds_between(self.started, self.over),
            exposed_wait_s=waited_s if self.sees_waits else None,
        )


class Traffic:
    """Records gradient messages of fully sharded layers, and waits for gradients and parameters.

    Sizes are always recorded, times only if `records_times` is set when a step begins.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.records_times = False
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
        """Makes the current stream wait for an operation, by index if it is a gradient message."""
        with named_range(WAIT):
            if not self._step.keeps_time:
                pending.wait()
                return
            with self.waiting(message):
                pending.wait()

    @contextlib.contextmanager
    def waiting(self, message: int | None = None) -> Iterator[None]:
        """Records the time inside the context as a wait, for a gradient message by its index."""
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
            self._step.keeps_time = self.records_times

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
