"""Averaging gradients while backward produces them.

Phases of one backward pass on every rank:

1. The gradient of the module's output arrives: a run begins, and its end is registered with the
   pass, so that it comes even if nobody asks for it.
2. A parameter's gradient is complete: it moves into its bucket, scaled to its share of the
   average. When the bucket and all before it are complete, the bucket's all-reduce starts.
   Buckets start in the order of their index only, so that ranks whose gradients arrive in a
   different order cannot wait for each other.
3. Backward is over: buckets that were not complete start now, with zeros for what is missing;
   then all are waited for. What is left to wait for here is the exposed communication.

A parameter that no rank had a gradient for keeps none; one that some ranks had a gradient for
gets the average on all of them, zeros counted for the rest.

Backward passes inside backward (reentrant checkpointing) may complete the same parameter several
times, so what arrives from one is sent only in phase 3.
"""

import collections
import dataclasses
import enum
import time
import warnings
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from paceline.core.errors import PacelineError
from paceline.parallel.buckets import Bucket, BucketPlan, GradientError
from paceline.parallel.clocks import Moment, now, seconds_between
from paceline.parallel.process_group import collective_error

_NO_TASK = -1
_LATE_FRACTION = 0.9
_SHORT_S = 0.01


class Launch(enum.Enum):
    """When a bucket's all-reduce starts."""

    WHEN_READY = enum.auto()
    """As soon as its gradients and all buckets before it are complete."""
    AFTER_BACKWARD = enum.auto()
    """All together, when backward is over."""
    ONE_BY_ONE = enum.auto()
    """When backward is over, each when the one before it has ended."""


class SynchronizationError(PacelineError):
    """Gradients could not be synchronised on this rank."""


class OverlapWarning(UserWarning):
    """Communication that could have been hidden behind backward was not."""


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
    backward_s: float
    """From the gradient of the module's output to the end of backward."""
    exposed_wait_s: float
    """From the end of backward to the end of the last all-reduce."""


class _Run:
    """One backward pass, from the gradient of its output to the end of its communication."""

    def __init__(self, *, task: int, num_buckets: int, began: Moment) -> None:
        self.task = task
        self.synchronize = False
        self.scale = 1.0
        self.complete: set[int] = set()
        """Parameters that this pass itself has completed, not one inside it."""
        self.num_complete = [0] * num_buckets
        self.scaled: list[set[int]] = [set() for _ in range(num_buckets)]
        self.sent: collections.deque[tuple[Tensor, dist.Work]] = collections.deque()
        self.num_bytes: list[int] = []
        self.num_received = 0
        self.began = self.over = self.end = began
        self.arrivals: dict[int, Moment] = {}
        self.launched: list[Moment] = []
        self.finished: list[Moment] = [began] * num_buckets
        # On the program's clock, also where the device has its own: asking that one would wait.
        self.began_at = self.first_at = self.last_at = time.perf_counter()


class GradientSynchronizer:
    """Keeps the gradients of some parameters equal over the ranks of a group.

    Args:
        names: The parameters' names, for messages.
        parameters: Those that are trained.
        plans: How they are divided.
        group: The ranks to average over.
        launch: When communication starts.
        reduction_dtype: What the sums are computed and sent in, by default the gradients' dtype.
        device: Where the parameters are.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        plans: Sequence[BucketPlan],
        *,
        group: dist.ProcessGroup,
        launch: Launch,
        reduction_dtype: torch.dtype | None,
        device: torch.device,
    ) -> None:
        self._names = names
        self._parameters = parameters
        self._group = group
        self._launch = launch
        self._reduction_dtype = reduction_dtype
        self._device = device
        self.buckets = [Bucket(plan, parameters) for plan in plans]
        self._places = {
            slot.tensor: (number, position)
            for number, plan in enumerate(plans)
            for position, slot in enumerate(plan.slots)
        }
        self._run: _Run | None = None
        self._last_run: _Run | None = None
        self._share: tuple[float, Tensor, dist.Work] | None = None
        self._warned_of_missing = False
        self._num_late_runs = 0
        self.arrived = [False] * len(parameters)
        """Which parameters had a gradient in the last synchronised backward on this rank."""
        self.num_runs = 0
        """Synchronised backward passes so far."""
        self.records_arrivals = False
        """Whether to keep when each gradient arrives."""
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._make_hook(index)
            )
            for index, parameter in enumerate(parameters)
        ]

    def close(self) -> None:
        """Lets go of the parameters; their gradients stay as they are."""
        for hook in self._hooks:
            hook.remove()

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass has begun and not ended."""
        return self._run is not None

    def set_weight(self, weight: float) -> None:
        """Gives this rank's gradient its share of the next average, by weight instead of by head.

        All ranks must call it; the sum of the weights is on its way while the model computes.
        """
        if not weight >= 0:
            raise SynchronizationError(f"a gradient's weight must not be negative, got {weight}")
        total = torch.tensor(weight, dtype=torch.float64, device=self._device)
        work = dist.all_reduce(total, group=self._group, async_op=True)
        assert work is not None
        self._share = (weight, total, work)

    def begin(self, *, synchronize: bool) -> None:
        """Begins a run for the backward pass that is going on, unless it has begun."""
        task = torch._C._current_graph_task_id()
        if self._run is None or self._run.task != task:
            if self._run is not None and self._run.num_bytes:
                raise SynchronizationError(
                    f"rank {dist.get_rank()}: the last backward pass was broken off while its "
                    "gradients were being averaged, and the ranks no longer agree on them; start "
                    "again from a checkpoint"
                )
            self._run = _Run(task=task, num_buckets=len(self.buckets), began=now(self._device))
            if task != _NO_TASK:
                Variable._execution_engine.queue_callback(self.finish)
        if synchronize and not self._run.synchronize:
            self._run.synchronize = True
            self._run.scale = self._take_share()
            self.arrived = [False] * len(self._parameters)

    @torch.no_grad()
    def finish(self) -> None:
        """Ends the run, if there is one: sends what was not sent, and waits for all."""
        run = self._run
        if run is None:
            return
        if run.synchronize:
            run.over = now(self._device)
            while len(run.num_bytes) < len(self.buckets):
                self._send_next(run)
            while run.sent:
                self._receive_next(run)
            run.end = now(self._device)
            self._last_run = run
            self.num_runs += 1
            if self._launch is Launch.WHEN_READY:
                self._watch_overlap(run)
        self._run = None

    def stats(self) -> SynchronizationStats | None:
        """Returns what is known of the last synchronisation; None before the first."""
        run = self._last_run
        if run is None:
            return None
        return SynchronizationStats(
            buckets=tuple(
                BucketStats(
                    num_bytes=num_bytes,
                    num_parameters=len(bucket.parameters),
                    launch_s=seconds_between(run.began, launched),
                    finish_s=seconds_between(run.began, finished),
                )
                for bucket, num_bytes, launched, finished in zip(
                    self.buckets, run.num_bytes, run.launched, run.finished, strict=True
                )
            ),
            backward_s=seconds_between(run.began, run.over),
            exposed_wait_s=seconds_between(run.over, run.end),
        )

    def arrivals_s(self) -> list[float]:
        """Returns when each gradient of the last run arrived, if that was recorded.

        A gradient that did not arrive is sent when backward is over.
        """
        run = self._last_run
        assert run is not None
        return [
            seconds_between(run.began, run.arrivals.get(index, run.over))
            for index in range(len(self._parameters))
        ]

    def _take_share(self) -> float:
        """Returns what this rank's gradient counts for in the average."""
        if self._share is None:
            return 1 / dist.get_world_size(self._group)
        own, total, work = self._share
        self._share = None
        work.wait()
        return own / float(total) if float(total) else 0.0

    def _make_hook(self, index: int) -> Callable[[Tensor], None]:
        @torch.no_grad()
        def hook(_parameter: Tensor) -> None:
            self._take(index)

        return hook

    def _take(self, index: int) -> None:
        """Takes in a gradient that a backward pass has completed."""
        if self._run is None:
            # The module's output was hidden in something that is not searched for tensors.
            self.begin(synchronize=True)
        run = self._run
        assert run is not None
        number, position = self._places[index]
        name = self._names[index]
        if index in run.complete:
            raise GradientError(
                f"parameter {name!r} got a second gradient in one backward pass, when the first "
                "was already on its way: it is used inside and outside of a reentrant checkpoint; "
                "use checkpoint(..., use_reentrant=False)"
            )
        nested = torch._C._current_graph_task_id() != run.task
        if not run.synchronize or nested:
            self.buckets[number].take(position, 1.0, name)
        elif self.buckets[number].take(position, run.scale, name):
            run.scaled[number].add(position)
        if run.synchronize:
            self._note_arrival(run, index)
            if not nested:
                run.complete.add(index)
                run.num_complete[number] += 1
                self._send_what_is_ready(run)

    def _note_arrival(self, run: _Run, index: int) -> None:
        run.last_at = time.perf_counter()
        if run.first_at == run.began_at:
            run.first_at = run.last_at
        self.arrived[index] = True
        if self.records_arrivals:
            run.arrivals[index] = now(self._device)

    def _send_what_is_ready(self, run: _Run) -> None:
        while self._launch is Launch.WHEN_READY and len(run.num_bytes) < len(self.buckets):
            following = len(run.num_bytes)
            if run.num_complete[following] < len(self.buckets[following].parameters):
                return
            self._send_next(run)

    def _send_next(self, run: _Run) -> None:
        number = len(run.num_bytes)
        bucket = self.buckets[number]
        self._fill(run, number)
        message = bucket.buffer
        if self._reduction_dtype is not None:
            # A message of its own is let go as soon as it has arrived, not only after backward.
            while run.sent and run.sent[0][1].is_completed():
                self._receive_next(run)
            message = message.to(self._reduction_dtype)
        run.launched.append(now(self._device))
        try:
            work = dist.all_reduce(message, group=self._group, async_op=True)
            assert work is not None
            if self._device.type == "cpu":
                work.get_future().add_done_callback(_note_finish(run, number))
            if self._launch is Launch.ONE_BY_ONE:
                work.wait()
        except RuntimeError as error:
            raise collective_error(
                f"all_reduce of bucket {number}", message.nbytes, error
            ) from error
        run.num_bytes.append(message.nbytes)
        run.sent.append((message, work))

    def _fill(self, run: _Run, number: int) -> None:
        """Makes the buffer this rank's share of the average, with zeros for what is missing."""
        bucket, scaled = self.buckets[number], run.scaled[number]
        bucket.presence.fill_(1)
        if len(scaled) == len(bucket.parameters):
            return
        for position, (parameter, view) in enumerate(
            zip(bucket.parameters, bucket.views, strict=True)
        ):
            if parameter.grad is None:
                view.zero_()
                bucket.presence[position] = 0
            elif position not in scaled:
                name = self._names[bucket.plan.slots[position].tensor]
                # A gradient of an earlier pass may have been replaced by user code since.
                if not bucket.take(position, run.scale, name):
                    view.mul_(run.scale)

    def _receive_next(self, run: _Run) -> None:
        number = run.num_received
        run.num_received += 1
        bucket = self.buckets[number]
        message, work = run.sent.popleft()
        try:
            work.wait()
        except RuntimeError as error:
            raise collective_error(
                f"all_reduce of bucket {number}", message.nbytes, error
            ) from error
        if self._device.type != "cpu":
            run.finished[number] = now(self._device)
        if message is not bucket.buffer:
            bucket.buffer.copy_(message)
        missing = [
            position
            for position, parameter in enumerate(bucket.parameters)
            if parameter.grad is None
        ]
        if missing:
            presence = bucket.presence.tolist()
            for position in missing:
                if presence[position]:
                    bucket.parameters[position].grad = bucket.views[position]

    def _watch_overlap(self, run: _Run) -> None:
        """Says once what keeps communication from being hidden."""
        if not all(self.arrived) and not self._warned_of_missing:
            self._warned_of_missing = True
            name = self._names[self.arrived.index(False)]
            warnings.warn(
                f"parameter {name!r} had no gradient on this rank: the buckets from its own on "
                "were sent only when backward was over. explain_unused() lists all such "
                "parameters; freeze those that are never used (requires_grad_(False))",
                OverlapWarning,
                stacklevel=2,
            )
        backward_s = run.last_at - run.began_at
        late = run.first_at - run.began_at > _LATE_FRACTION * backward_s > _LATE_FRACTION * _SHORT_S
        self._num_late_runs = self._num_late_runs + 1 if late and len(self.buckets) > 1 else 0
        # Twice, because the first pass of a compiled model compiles.
        if self._num_late_runs == 2:
            warnings.warn(
                f"all gradients arrived in the last {1 - _LATE_FRACTION:.0%} of backward, so "
                "nothing could be sent while it ran. torch.compile of the whole model does this: "
                "compile each block instead (for block in model.blocks: block.compile())",
                OverlapWarning,
                stacklevel=2,
            )


def _note_finish(run: _Run, number: int) -> Callable[[object], None]:
    def note(_future: object) -> None:
        run.finished[number] = time.perf_counter()

    return note
