"""Averaging gradients while backward produces them.

Phases of one backward pass on every rank:

1. The gradient of the module's output arrives: a run begins, and its end is registered with the
   pass, so that it comes even if nobody asks for it.
2. A parameter's gradient is complete: it moves into its bucket, multiplied by this rank's
   weight in the average. When the bucket and all before it are complete, the bucket's all-reduce
   starts. Buckets start in the order of their index only, so that ranks whose gradients arrive in
   a different order cannot wait for each other.
3. Backward is over: buckets that were not complete start now, with zeros for what is missing;
   then all are waited for. What is left to wait for here is the exposed communication.

A parameter that no rank had a gradient for keeps none; one that some ranks had a gradient for
gets the average on all of them, zeros counted for the rest.

A pass that completes no parameter, as for gradients of the input alone, sends nothing.

Backward passes inside backward (reentrant checkpointing) may complete the same parameter several
times, so what arrives from one is sent only in phase 3.
"""

import functools
import gc
import weakref
from collections.abc import Callable, MutableMapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from paceline.core.errors import PacelineError
from paceline.core.ranges import WAIT, bucket_range
from paceline.kernels.named_range import named_range
from paceline.parallel.buckets import GradientError
from paceline.parallel.ranks.device_clock import Moment, now, seconds_between
from paceline.parallel.ranks.pending import collective_error
from paceline.parallel.reducer.backward_pass import (
    OUTSIDE_BACKWARD,
    AnyWork,
    BackwardRun,
    SynchronizationStats,
    current_pass,
)
from paceline.parallel.reducer.gradient_bucket import GradientBucket
from paceline.parallel.reducer.hooks import when_complete
from paceline.parallel.reducer.overlap_warnings import OverlapMonitor
from paceline.parallel.reducer.settings import LaunchPolicy, Settings, SyncState

_synchronizers: MutableMapping[Tensor, "weakref.ref[GradientSynchronizer]"] = WeakIdKeyDictionary()
"""Who averages a parameter's gradients: weak on both sides."""


class SynchronizationError(PacelineError):
    """Gradients could not be synchronised on this rank."""


class GradientSynchronizer:
    """Keeps the gradients of some parameters equal over the ranks of a group.

    Args:
        names: The parameters' names, for messages.
        parameters: Those that are trained.
        buckets: How they are divided, in the order in which they are sent.
        settings: How they are sent.
        sync_state: What the user wants.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        buckets: Sequence[GradientBucket],
        *,
        settings: Settings,
        sync_state: SyncState,
    ) -> None:
        for name, parameter in zip(names, parameters, strict=True):
            other = _synchronizers.get(parameter)
            if other is not None and other() is not None:
                gc.collect()  # It may be dropped already, and wait in a cycle to be freed.
            if other is not None and other() is not None:
                raise SynchronizationError(
                    f"parameter {name!r} belongs to another data-parallel container already; its "
                    "gradients would be averaged twice"
                )
        self._names = names
        self._parameters = parameters
        self._settings = settings
        self._sync_state = sync_state
        self.buckets = buckets
        self._places = {
            slot.tensor: (number, position)
            for number, bucket in enumerate(buckets)
            for position, slot in enumerate(bucket.plan.slots)
        }
        self._run: BackwardRun | None = None
        self._last_run: BackwardRun | None = None
        self._overlap_monitor = OverlapMonitor()
        self._side_stream = (
            torch.cuda.Stream(settings.device)  # type: ignore[no-untyped-call]
            if settings.device.type == "cuda"
            else None
        )
        self.arrived = [False] * len(parameters)
        """Which parameters had a gradient in the last synchronised backward on this rank."""
        self.records_arrivals = False
        """Whether to keep when each gradient arrives."""
        self.after_run: Callable[[], None] = _nothing
        """Called when a pass was synchronised, on all ranks."""
        handles = []
        for index, parameter in enumerate(parameters):
            tell = functools.partial(GradientSynchronizer.take, index=index)
            handles.append(when_complete(parameter, self, tell))
            _synchronizers[parameter] = weakref.ref(self)
        self._remove_hooks = weakref.finalize(self, _remove_all, handles)

    def close(self) -> None:
        """Lets go of the parameters; their gradients stay as they are."""
        self._remove_hooks()
        for parameter in self._parameters:
            _synchronizers.pop(parameter, None)

    @property
    def _is_early(self) -> bool:
        return self._settings.launch is LaunchPolicy.WHEN_READY and len(self.buckets) > 1

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass has begun and not ended."""
        return self._run is not None

    def watch_outputs(self, outputs: Sequence[Tensor], *, average: bool) -> None:
        """Lets the gradients of a module's outputs begin a run.

        Args:
            outputs: Tensors of the forward pass.
            average: Whether the pass is to be averaged, as soon as it completes a gradient.
        """
        if self._is_early:
            self._overlap_monitor.look_at_graph(outputs)
        for output in outputs:
            # A leaf, such as a parameter, would keep the hook for ever.
            if output.grad_fn is not None:
                output.register_hook(  # type: ignore[no-untyped-call]
                    lambda _gradient: self.begin(average=average)
                )

    def forget_broken_pass(self) -> None:
        """Drops a backward pass that an error has ended; outside of backward only.

        One that had begun to send is never forgotten: its messages would be taken for the next's.
        """
        if self._run is not None and self._run.message_bytes:
            raise SynchronizationError(
                f"rank {dist.get_rank()}: the last backward pass was broken off while its "
                "gradients were being averaged, and the ranks no longer agree on them; start again "
                "from a checkpoint"
            )
        self._run = None

    def begin(self, *, average: bool) -> None:
        """Begins a run for the backward pass that is going on, unless it has begun."""
        task = current_pass()
        if self._run is None:
            self._run = BackwardRun(
                task=task, num_buckets=len(self.buckets), started=now(self._settings.device)
            )
            if task != OUTSIDE_BACKWARD:
                Variable._execution_engine.queue_callback(self.finish)
        elif self._run.task != task:
            raise SynchronizationError(
                "a reentrant checkpoint around the whole container ran a backward pass inside of "
                "the container's own; use checkpoint(..., use_reentrant=False)"
            )
        self._run.average |= average

    def take_part(self) -> None:
        """Averages the pass that has begun, whether it completes a gradient or not."""
        run = self._run
        assert run is not None
        if run.weight is None:
            run.weight = self._sync_state.take_weight(dist.get_world_size(self._settings.group))
            self.arrived = [False] * len(self._parameters)

    @torch.no_grad()
    def finish(self) -> None:
        """Ends the run, if there is one: sends what was not sent, and waits for all."""
        run = self._run
        if run is None or run.weight is None:
            self._run = None
            return
        run.backward_over = now(self._settings.device)
        while len(run.message_bytes) < len(self.buckets):
            self._send_next(run, run.weight)
        while run.in_flight:
            self._receive_next(run)
        run.all_received = now(self._settings.device)
        self._last_run = run
        self.after_run()
        self._run = None
        self._sync_state.forward_is_pending = False
        if self._is_early:
            self._overlap_monitor.look_at_arrivals(self._names, self.arrived)

    def stats(self) -> SynchronizationStats | None:
        """Returns what is known of the last synchronisation; None before the first."""
        if self._last_run is None:
            return None
        return self._last_run.stats([len(bucket.parameters) for bucket in self.buckets])

    def arrivals_s(self) -> list[float]:
        """Returns when each gradient of the last run arrived, if that was recorded.

        A gradient that did not arrive is sent when backward is over.
        """
        run = self._last_run
        assert run is not None
        return [
            seconds_between(run.started, run.arrivals.get(index, run.backward_over))
            for index in range(len(self._parameters))
        ]

    @torch.no_grad()
    def take(self, index: int) -> None:
        """Takes in a gradient that a backward pass has completed."""
        if self._run is None:
            # The module's output was hidden in something that is not searched for tensors.
            self.begin(average=self._sync_state.forward_synchronizes)
        run = self._run
        assert run is not None
        if run.average and self._sync_state.synchronize:
            self.take_part()
        number, position = self._places[index]
        bucket = self.buckets[number]
        if index in run.complete:
            raise GradientError(
                f"parameter {self._names[index]!r} got a second gradient in one backward pass, "
                "when the first had been taken for complete: it is used inside and outside of a "
                "reentrant checkpoint; use checkpoint(..., use_reentrant=False)"
            )
        nested = current_pass() != run.task
        if run.weight is None or nested:
            bucket.keep(position)
        elif bucket.take(position, run.weight):
            run.scaled[number].add(position)
        if run.weight is None:
            return
        self.arrived[index] = True
        if self.records_arrivals:
            run.arrivals[index] = now(self._settings.device)
        if self._side_stream is None:
            self._note_finished(run)
        if not nested:
            run.complete.add(index)
            run.num_complete[number] += 1
            self._send_what_is_ready(run, run.weight)

    def _send_what_is_ready(self, run: BackwardRun, weight: float) -> None:
        while (
            self._settings.launch is LaunchPolicy.WHEN_READY
            and (number := len(run.message_bytes)) < len(self.buckets)
            and run.num_complete[number] == len(self.buckets[number].parameters)
        ):
            self._send_next(run, weight)

    def _send_next(self, run: BackwardRun, weight: float) -> None:
        number = len(run.message_bytes)
        bucket = self.buckets[number]
        while bucket.is_received_early and run.in_flight and run.in_flight[0][1].is_completed():
            self._receive_next(run)
        message = bucket.pack(run.scaled[number], weight)
        run.message_bytes.append(message.nbytes)
        run.launched.append(now(self._settings.device))
        try:
            with named_range(bucket_range(number)):
                work = bucket.start(message, self._settings.group)
            run.in_flight.append((message, work))
            if self._side_stream is not None:
                run.finished[number] = self._moment_after(work, self._side_stream)
            if self._settings.launch is LaunchPolicy.ONE_BY_ONE:
                self._receive_next(run)
        except RuntimeError as error:
            raise _bucket_error(number, message, error) from error

    def _moment_after(self, work: AnyWork, stream: torch.cuda.Stream) -> Moment:
        # Waiting in a stream of its own marks the end of the message, and holds up nothing else.
        with torch.cuda.stream(stream):
            work.wait()
            return now(self._settings.device)

    def _note_finished(self, run: BackwardRun) -> None:
        """Notes which messages have ended since the last look.

        A callback at the very moment would run on the communication's own thread and compete with
        backward for the interpreter: that made steps 1.5% slower.
        """
        for number in range(run.num_seen_finished, len(run.message_bytes)):
            if not run.in_flight[number - run.num_received][1].is_completed():
                return
            run.finished[number] = now(self._settings.device)
            run.num_seen_finished += 1

    def _receive_next(self, run: BackwardRun) -> None:
        number = run.num_received
        run.num_received += 1
        bucket = self.buckets[number]
        message, work = run.in_flight.popleft()
        try:
            with named_range(WAIT):
                work.wait()
        except RuntimeError as error:
            raise _bucket_error(number, message, error) from error
        if self._side_stream is None and run.num_seen_finished == number:
            run.finished[number] = now(self._settings.device)
            run.num_seen_finished += 1
        bucket.unpack(message)


def _remove_all(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _bucket_error(number: int, message: Tensor, error: RuntimeError) -> PacelineError:
    return collective_error(f"reduction of bucket {number}", message.nbytes, error)


def _nothing() -> None:
    pass
