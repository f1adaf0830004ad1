"""Gradient averaging overlapped with backward.

Phases of one backward pass on every rank:

1. The gradient of the module's output arrives: a run begins and registers a callback at the end of
   the pass, so it completes without a call from the training loop.
2. A parameter's gradient is complete: it is scaled by this rank's weight and moved into its bucket.
   Small gradients are moved in groups. When a bucket and all buckets before it are complete, its
   collective starts. Buckets start strictly in index order, so ranks whose gradients arrive in
   different orders cannot deadlock. If messages use separate memory, the previous message is then
   waited for and freed, so at most two exist: one in flight and one being filled.
3. Backward is over: incomplete buckets start now, with zeros for missing gradients. After all
   containers of the pass have sent their buckets, all messages are waited for. This wait is the
   exposed communication.

The plan alone determines the order of sends and waits. The program never polls whether a message
has completed: on a GPU it runs ahead of the device and cannot know.

A parameter without a gradient on every rank keeps none. If some ranks have a gradient for it, all
ranks get the average, in which the other ranks count as zeros.

A pass that completes no parameter, for example for gradients of the input only, sends nothing.

Backward passes inside backward (reentrant checkpointing) may complete the same parameter several
times, so their gradients are sent only in phase 3.
"""

import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.accounting.communication.buckets import GROUP_BYTES
from paceline.core.errors import PacelineError
from paceline.core.ranges import WAIT, bucket_range
from paceline.kernels.named_range import named_range
from paceline.parallel.buckets import GradientError
from paceline.parallel.ranks.device_clock import now
from paceline.parallel.ranks.pending import collective_error
from paceline.parallel.ranks.rank_weight import RankWeight
from paceline.parallel.ranks.waiting import counted_wait
from paceline.parallel.reducer import end_of_backward
from paceline.parallel.reducer.backward_pass import (
    OUTSIDE_BACKWARD,
    BackwardRun,
    RunTimes,
    SynchronizationStats,
    current_pass,
)
from paceline.parallel.reducer.gradient_bucket import GradientBucket
from paceline.parallel.reducer.hooks import take_when_complete
from paceline.parallel.reducer.overlap_warnings import OverlapMonitor
from paceline.parallel.reducer.ownership import SynchronizationError, claim, release
from paceline.parallel.reducer.settings import LaunchPolicy, Settings, SyncState


class GradientSynchronizer:
    """Keeps the gradients of some parameters equal over the ranks of a group.

    Args:
        names: The parameters' names, for error messages.
        parameters: The trained parameters.
        buckets: The buckets of the parameters, in sending order.
        settings: How gradients are sent.
        sync_state: The user's requests for the next pass.
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
        claim(parameters, names, self)
        self.made = end_of_backward.next_number()
        self.rank = dist.get_rank()
        self._names = names
        self._parameters = parameters
        self._settings = settings
        self._sync_state = sync_state
        self.buckets = buckets
        self._bucket_lengths = [len(bucket.parameters) for bucket in buckets]
        self._places = [(0, 0, 0)] * len(parameters)
        """Each parameter's bucket index, position in the bucket and size in bytes."""
        for number, bucket in enumerate(buckets):
            for position, slot in enumerate(bucket.plan.slots):
                num_bytes = parameters[slot.tensor].nbytes
                self._places[slot.tensor] = (number, position, num_bytes)
        self._run: BackwardRun | None = None
        self._last_run: BackwardRun | None = None
        self._overlap_monitor = OverlapMonitor()
        self._side_stream = (
            torch.cuda.Stream(settings.device)  # type: ignore[no-untyped-call]
            if settings.device.type == "cuda"
            else None
        )
        self.arrived = bytearray(len(parameters))
        """Which parameters had a gradient in the last synchronised backward on this rank."""
        self.records_times = False
        """Whether to record arrival times even if the user has not requested statistics."""
        self.before_run: Callable[[], None] = _nothing
        """Called on all ranks when the synchronisation of a pass begins."""
        self.after_run: Callable[[], None] = _nothing
        """Called on all ranks when the synchronisation of a pass has ended."""
        handles = [
            take_when_complete(parameter, self, index) for index, parameter in enumerate(parameters)
        ]
        self._remove_hooks = weakref.finalize(self, _remove_all, handles)

    def close(self) -> None:
        """Removes the hooks and releases the parameters; gradients are unchanged."""
        self._remove_hooks()
        release(self._parameters)

    @property
    def _is_early(self) -> bool:
        return self._settings.launch is LaunchPolicy.WHEN_READY and len(self.buckets) > 1

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass has begun and not ended."""
        return self._run is not None

    def watch_outputs(self, outputs: Sequence[Tensor], *, average: bool) -> None:
        """Registers hooks that begin a run when the gradient of an output arrives.

        Args:
            outputs: Output tensors of the forward pass.
            average: Whether to average the pass if it completes a gradient.
        """
        if average:
            end_of_backward.expect_backward(self)
        if self._is_early:
            self._overlap_monitor.look_at_graph(outputs)
        for output in outputs:
            # A leaf, such as a parameter, would keep the hook forever.
            if output.grad_fn is not None:
                output.register_hook(  # type: ignore[no-untyped-call]
                    lambda _gradient: self._begin_from_output(average)
                )

    def _begin_from_output(self, average: bool) -> None:
        self.begin(average=average)  # A hook must not return anything.

    def forget_broken_pass(self) -> None:
        """Discards a backward pass that an error aborted; call only outside of backward.

        Raises if the pass had begun to send: its messages would be mistaken for the next pass's.
        """
        run, self._run = self._run, None
        if run is None:
            return
        end_of_backward.leave(self, run.task)
        if run.message_bytes:
            self._run = run
            raise SynchronizationError(
                f"rank {dist.get_rank()}: the last backward pass was interrupted while its "
                "gradients were being averaged, and the ranks no longer agree on them; restart "
                "from a checkpoint"
            )

    def begin(self, *, average: bool) -> BackwardRun:
        """Returns the run of the current backward pass, and begins one if there is none."""
        task = current_pass()
        if self._run is None:
            times = None
            if self.records_times or self._sync_state.records_statistics:
                times = RunTimes(self._settings.device, len(self.buckets))
            self._run = BackwardRun(task=task, bucket_lengths=self._bucket_lengths, times=times)
            if task != OUTSIDE_BACKWARD:
                end_of_backward.take_part(self, task)
        elif self._run.task != task:
            raise SynchronizationError(
                "a reentrant checkpoint around the whole container ran a backward pass inside the "
                "container's own; use checkpoint(..., use_reentrant=False)"
            )
        self._run.average |= average
        return self._run

    def take_part(self, run: BackwardRun) -> None:
        """Marks a run as averaged, even if it completes no gradient on this rank."""
        self.before_run()
        num_ranks = dist.get_world_size(self._settings.group)
        run.weight = self._sync_state.take_weight(num_ranks) or RankWeight(1 / num_ranks)
        self.arrived = bytearray(len(self._parameters))

    @torch.no_grad()
    def send_rest(self) -> None:
        """Sends the buckets not sent during backward; ends a run that is not averaged."""
        run = self._run
        if run is None or run.weight is None:
            self._run = None
            return
        if run.times is not None:
            run.times.backward_over = now(self._settings.device)
        while len(run.message_bytes) < len(self.buckets):
            self._send_next(run)

    @torch.no_grad()
    def receive_rest(self) -> None:
        """Waits for all messages in flight and ends the run, if there is one."""
        run = self._run
        if run is None:
            return
        while run.in_flight:
            self._receive_next(run)
        if run.times is not None:
            run.times.all_received = now(self._settings.device)
        self._last_run = run
        self.after_run()
        self._run = None
        self._sync_state.forward_is_pending = False
        if self._is_early:
            self._overlap_monitor.look_at_arrivals(self._names, self.arrived)

    def stats(self) -> SynchronizationStats | None:
        """Returns statistics of the last synchronisation, or None if they were not recorded."""
        if self._last_run is None or self._last_run.times is None:
            return None
        return self._last_run.times.stats(self._bucket_lengths, self._last_run.message_bytes)

    def message_bytes(self) -> list[int]:
        """Returns the size of each message of the last synchronisation."""
        return [] if self._last_run is None else list(self._last_run.message_bytes)

    def arrivals_s(self) -> list[float]:
        """Returns each gradient's arrival time in the last run; empty if not recorded."""
        if self._last_run is None or self._last_run.times is None:
            return []
        return self._last_run.times.arrivals_s(len(self._parameters))

    def take(self, index: int) -> None:
        """Processes a gradient that backward has completed; called by the parameter's hook."""
        run = self._run
        if run is None:
            # The output was in a container that `tensors_in` does not search, so no hook fired.
            run = self.begin(average=self._sync_state.forward_synchronizes)
        number, position, num_bytes = self._places[index]
        if run.weight is None:
            if not (run.average and self._sync_state.synchronize):
                self._keep(number, position)
                return
            self.take_part(run)
        if run.is_complete[index]:
            raise GradientError(
                f"parameter {self._names[index]!r} got a second gradient in one backward pass, "
                "after the first was taken as complete: it is used inside and outside a reentrant "
                "checkpoint; use checkpoint(..., use_reentrant=False)"
            )
        self.arrived[index] = 1
        if run.times is not None:
            run.times.arrivals[index] = now(self._settings.device)
        if current_pass() != run.task:
            self._keep(number, position)
            return
        run.is_complete[index] = 1
        run.waiting[number].append(position)
        run.waiting_bytes[number] += num_bytes
        run.num_left[number] -= 1
        if run.num_left[number] == 0:
            self._move_waiting(run, number)
            if self._settings.launch is LaunchPolicy.WHEN_READY:
                self._send_what_is_ready(run)
        elif run.waiting_bytes[number] >= GROUP_BYTES:
            self._move_waiting(run, number)

    @torch.no_grad()
    def _keep(self, number: int, position: int) -> None:
        self.buckets[number].keep(position)

    @torch.no_grad()
    def _move_waiting(self, run: BackwardRun, number: int) -> None:
        """Moves the bucket's complete gradients into its buffer."""
        positions = run.waiting[number]
        assert run.weight is not None
        if positions:
            self.buckets[number].take(positions, run.weight)
            run.taken[number].update(positions)
            run.waiting[number] = []
            run.waiting_bytes[number] = 0

    @torch.no_grad()
    def _send_what_is_ready(self, run: BackwardRun) -> None:
        while (number := len(run.message_bytes)) < len(self.buckets) and not run.num_left[number]:
            self._send_next(run)

    def _send_next(self, run: BackwardRun) -> None:
        number = len(run.message_bytes)
        bucket = self.buckets[number]
        assert run.weight is not None
        self._move_waiting(run, number)
        message = bucket.pack(run.taken[number], run.weight)
        run.message_bytes.append(message.nbytes)
        if run.times is not None:
            run.times.launch()
        try:
            with named_range(bucket_range(number)):
                work = bucket.start(message, self._settings.group)
        except RuntimeError as error:
            raise _bucket_error(number, message, error) from error
        run.in_flight.append((message, work))
        if run.times is not None:
            run.times.watch(number, work, self._side_stream)
        del message, work  # Otherwise the message received below would not be freed.
        if self._settings.launch is LaunchPolicy.ONE_BY_ONE:
            self._receive_next(run)
        elif (
            number and self.buckets[number - 1].is_received_early and end_of_backward.is_alone(self)
        ):
            while len(run.in_flight) > 1:
                self._receive_next(run)

    def _receive_next(self, run: BackwardRun) -> None:
        number = run.num_received
        run.num_received += 1
        message, work = run.in_flight.popleft()
        try:
            with named_range(WAIT), counted_wait():
                work.wait()
        except RuntimeError as error:
            raise _bucket_error(number, message, error) from error
        if run.times is not None:
            run.times.receive(number)
        self.buckets[number].unpack(message)


def _remove_all(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _bucket_error(number: int, message: Tensor, error: RuntimeError) -> PacelineError:
    return collective_error(f"reduction of bucket {number}", message.nbytes, error)


def _nothing() -> None:
    pass
