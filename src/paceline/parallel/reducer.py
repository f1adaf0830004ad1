"""Gradient averaging overlapped with backward.

Phases of one backward pass on every rank:

1. The gradient of the module's output arrives: a run begins and registers a callback at the end of
   the pass, so it completes without a call from the training loop.
2. A parameter's gradient is complete: its hook calls `GradientSynchronizer.take`, which scales it
   by this rank's weight and moves it into its bucket, small gradients in groups. When a bucket and
   all buckets before it are complete, its collective starts. Buckets start strictly in index order,
   so ranks whose gradients arrive in different orders cannot deadlock. If messages use separate
   memory, the previous message is then waited for and freed, so at most two exist.
3. Backward is over: incomplete buckets start now, with zeros for missing gradients. After all
   containers of the pass have sent their buckets, in the order of their creation, all messages are
   waited for: ranks that reach two containers in different orders cannot deadlock either. This wait
   is the exposed communication.

The plan alone determines the order of sends and waits. The program never polls whether a message
has completed: on a GPU it runs ahead of the device and cannot know.

A parameter without a gradient on every rank keeps none. If some ranks have a gradient for it, all
ranks get the average, in which the other ranks count as zeros. A pass that completes no parameter,
for example for gradients of the input only, sends nothing. Backward passes inside backward
(reentrant checkpointing) may complete the same parameter several times, so their gradients are sent
only in phase 3.
"""

import collections
import dataclasses
import enum
import gc
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from paceline.accounting.buckets import GROUP_BYTES
from paceline.core.errors import PacelineError
from paceline.core.ranges import WAIT, bucket_range
from paceline.devices import accelerator
from paceline.devices.named_range import named_range
from paceline.parallel.buckets import GradientBucket, GradientError, RankWeight
from paceline.parallel.ranks.collectives import GroupReference
from paceline.parallel.ranks.pending import Pending, collective_error, counted_wait
from paceline.parallel.traffic import RunTimes, SynchronizationStats

OUTSIDE_BACKWARD = -1
"""Returned by `current_pass` outside of backward."""


current_pass: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the autograd engine's ID of the innermost current backward pass."""


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


class BackwardRun:
    """A backward pass, from the gradient of its output to the end of its communication."""

    def __init__(self, *, task: int, bucket_lengths: Sequence[int], times: RunTimes | None) -> None:
        self.task = task
        """The autograd engine's ID of the pass."""
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
        self.in_flight: collections.deque[tuple[Tensor, dist.Work | Pending]] = collections.deque()
        self.num_received = 0
        self.message_bytes: list[int] = []
        """Bytes of the messages sent so far, in bucket order."""


class SynchronizationError(PacelineError):
    """Gradients could not be synchronised on this rank."""


class OverlapWarning(UserWarning):
    """Communication that could have overlapped with backward did not."""


class GradientSynchronizer:
    """Keeps the gradients of some parameters equal over the ranks of a group."""

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        buckets: Sequence[GradientBucket],
        *,
        settings: Settings,
        sync_state: SyncState,
    ) -> None:
        _claim(parameters, names, self)
        self.number = next(_numbers)
        """The order of creation, which is the same on all ranks."""
        self.rank = dist.get_rank()
        """The rank that it belongs to: ranks may be threads of one process."""
        self._names = names
        self._parameters = parameters
        self._settings = settings
        self._sync_state = sync_state
        self.buckets = buckets
        self._bucket_lengths = [len(bucket.parameters) for bucket in buckets]
        self._slots = [(0, 0, 0)] * len(parameters)
        """Each parameter's bucket index, position in the bucket and size in bytes."""
        for number, bucket in enumerate(buckets):
            for position, slot in enumerate(bucket.plan.slots):
                num_bytes = parameters[slot.tensor].nbytes
                self._slots[slot.tensor] = (number, position, num_bytes)
        self._run: BackwardRun | None = None
        self._last_run: BackwardRun | None = None
        self._overlap_monitor = OverlapMonitor()
        self._side_stream = accelerator.new_stream(settings.device)
        self.arrived = bytearray(len(parameters))
        """Which parameters had a gradient in the last synchronised backward on this rank."""
        self.records_times = False
        """Whether to record arrival times even if the user has not requested statistics."""
        self.before_run: Callable[[], None] = lambda: None
        """Called on all ranks when the synchronisation of a pass begins."""
        self.after_run: Callable[[], None] = lambda: None
        """Called on all ranks when the synchronisation of a pass has ended."""
        handles = [
            when_complete(parameter, self.take, index) for index, parameter in enumerate(parameters)
        ]
        self._remove_hooks = weakref.finalize(self, _remove_all, handles)

    def close(self) -> None:
        """Removes the hooks and releases the parameters; gradients are unchanged."""
        self._remove_hooks()
        for parameter in self._parameters:
            _owners.pop(parameter, None)

    @property
    def _is_early(self) -> bool:
        return self._settings.launch is LaunchPolicy.WHEN_READY and len(self.buckets) > 1

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass has begun and not ended."""
        return self._run is not None

    def watch_outputs(self, outputs: Sequence[Tensor], *, average: bool) -> None:
        """Registers hooks that begin a run when the gradient of an output arrives."""
        if average:
            _expected.add(self)
        if self._is_early:
            self._overlap_monitor.look_at_graph(outputs)

        def begin(_gradient: Tensor) -> None:
            self.begin(average=average)

        for output in outputs:
            # A leaf, such as a parameter, would keep the hook forever.
            if output.grad_fn is not None:
                output.register_hook(begin)  # type: ignore[no-untyped-call]

    def forget_broken_pass(self) -> None:
        """Discards a backward pass that an error aborted; call only outside of backward.

        Raises if the pass had begun to send: its messages would be mistaken for the next pass's.
        """
        run, self._run = self._run, None
        if run is None:
            return
        _synchronizers.pop(run.task, None)
        _expected.discard(self)
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
                times = RunTimes(self._settings.device)
            self._run = BackwardRun(task=task, bucket_lengths=self._bucket_lengths, times=times)
            if task != OUTSIDE_BACKWARD:
                _join_backward(self, task)
        elif self._run.task != task:
            raise SynchronizationError(
                "a reentrant checkpoint around the whole container ran a backward pass inside the "
                "container's own; use checkpoint(..., use_reentrant=False)"
            )
        self._run.average |= average
        return self._run

    def begin_reduction(self, run: BackwardRun) -> None:
        """Begins to average a run, even if it completes no gradient on this rank."""
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
            run.times.backward_over = accelerator.now(self._settings.device)
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
            run.times.all_received = accelerator.now(self._settings.device)
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
        return self._last_run.times.stats()

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
        number, position, num_bytes = self._slots[index]
        if run.weight is None:
            if not (run.average and self._sync_state.synchronize):
                self._keep(number, position)
                return
            self.begin_reduction(run)
        if run.is_complete[index]:
            raise GradientError(
                f"parameter {self._names[index]!r} got a second gradient in one backward pass, "
                "after the first was taken as complete: it is used inside and outside a reentrant "
                "checkpoint; use checkpoint(..., use_reentrant=False)"
            )
        self.arrived[index] = 1
        if run.times is not None:
            run.times.arrivals[index] = accelerator.now(self._settings.device)
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
        num_bytes = bucket.sent_bytes(message)
        run.message_bytes.append(num_bytes)
        if run.times is not None:
            run.times.launch(num_bytes, self._bucket_lengths[number])
        try:
            with named_range(bucket_range(number)):
                work = bucket.start(message, self._settings.group)
        except RuntimeError as error:
            raise _bucket_error(number, message, error) from error
        run.in_flight.append((message, work))
        if run.times is not None:
            run.times.watch(work, self._side_stream)
        del message, work  # Otherwise the message received below would not be freed.
        if self._settings.launch is LaunchPolicy.ONE_BY_ONE:
            self._receive_next(run)
        elif number and self.buckets[number - 1].is_received_early and _is_alone(self):
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


_numbers = itertools.count()
_synchronizers: dict[int, list["weakref.ref[GradientSynchronizer]"]] = {}
"""The synchronisers that take part in each pass, by the autograd engine's ID of the pass."""
_expected: "weakref.WeakSet[GradientSynchronizer]" = weakref.WeakSet()
"""Synchronisers whose forward pass has run, and whose backward is to be averaged."""


def _join_backward(synchronizer: GradientSynchronizer, task: int) -> None:
    """Arranges for a synchroniser to be finished together with all others of the current pass."""
    if task not in _synchronizers:
        _synchronizers[task] = []
        Variable._execution_engine.queue_callback(lambda: _finish_backward(task))
    _synchronizers[task].append(weakref.ref(synchronizer))


def _finish_backward(task: int) -> None:
    alive = [reference() for reference in _synchronizers.pop(task)]
    ordered = sorted((one for one in alive if one is not None), key=lambda one: one.number)
    for synchronizer in ordered:
        synchronizer.send_rest()
    for synchronizer in ordered:
        synchronizer.receive_rest()
    # Others, such as a container whose forward was aborted, are no longer expected.
    ranks = {synchronizer.rank for synchronizer in ordered}
    for other in list(_expected):
        if other.rank in ranks:
            _expected.discard(other)


def _is_alone(synchronizer: GradientSynchronizer) -> bool:
    """Returns whether this is the only synchroniser of its rank with a pending backward.

    Only then may it wait during backward: ranks that reach two containers in different orders would
    otherwise each wait for a message that the other sends later.
    """
    return all(one is synchronizer or one.rank != synchronizer.rank for one in list(_expected))


def when_complete(
    parameter: Tensor, method: Callable[..., None], *arguments: Any
) -> RemovableHandle:
    """Calls a method after each gradient of a parameter, as long as its object is alive."""
    call = call_weakly(method, *arguments)
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call]
    return handle


def call_weakly(method: Callable[..., None], *arguments: Any) -> Callable[..., None]:
    """Returns a function that calls a method with these arguments, whatever it is called with.

    It does not keep the method's object alive. A parameter holds its hooks in memory that Python's
    garbage collector does not traverse: with a strong reference, neither would ever be freed.
    """
    bound: Any = method
    reference, function = weakref.ref(bound.__self__), bound.__func__

    def call(*_ignored: Any) -> None:
        if (alive := reference()) is not None:
            function(alive, *arguments)

    return call


_owners: MutableMapping[Tensor, "weakref.ref[Any]"] = WeakIdKeyDictionary()
"""The owner of each parameter, so that no gradient is averaged twice."""


def _claim(parameters: Sequence[Tensor], names: Sequence[str], owner: object) -> None:
    """Makes an object the owner of parameters; raises if one of them has another owner."""
    for name, parameter in zip(names, parameters, strict=True):
        other = _owners.get(parameter)
        if other is not None and other() is not None:
            gc.collect()  # The old owner may be unreachable, but held by a reference cycle.
        if other is not None and other() is not None:
            raise SynchronizationError(
                f"parameter {name!r} already belongs to another data-parallel container; its "
                "gradients would be averaged twice"
            )
    for parameter in parameters:
        _owners[parameter] = weakref.ref(owner)


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested tuples, lists, dictionaries and dataclasses."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from tensors_in(item)
    elif isinstance(output, dict):
        yield from tensors_in(list(output.values()))
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        yield from tensors_in([getattr(output, f.name) for f in dataclasses.fields(output)])


class OverlapMonitor:
    """Inspects the graph and gradient arrivals of a container that sends during backward."""

    def __init__(self) -> None:
        self._has_seen_graph = False
        self._warned_of_missing = False

    def look_at_graph(self, outputs: Iterable[Tensor]) -> None:
        """Warns if one compiled graph computes all gradients, so that all arrive at the end."""
        if self._has_seen_graph:
            return
        self._has_seen_graph = True
        sources = _sources_of_gradients(outputs)
        if len(sources) == 1 and _COMPILED in sources.pop().name():
            _warn(
                "the model is compiled as a whole: all its gradients become complete together at "
                "the end of backward, so nothing can be sent during backward. Compile each block "
                "instead (for block in model.blocks: block.compile())"
            )

    def look_at_arrivals(self, names: Sequence[str], arrived: Sequence[int]) -> None:
        """Warns if a parameter had no gradient."""
        if all(arrived) or self._warned_of_missing:
            return
        self._warned_of_missing = True
        _warn(
            f"parameter {names[arrived.index(0)]!r} had no gradient on this rank: the buckets "
            "from its own on were sent only after backward. explain_unused() lists all such "
            "parameters; freeze those that are never used (requires_grad_(False))"
        )


_COMPILED = "Compiled"


def _sources_of_gradients(outputs: Iterable[Tensor]) -> set[Node]:
    """Returns graph nodes that pass gradients to parameters; stops once two are found."""
    waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(waiting)
    sources: set[Node] = set()
    while waiting and len(sources) < 2:
        node = waiting.pop()
        for following, _ in node.next_functions:
            if following is None:
                continue
            if hasattr(following, "variable"):
                sources.add(node)
            elif following not in seen:
                seen.add(following)
                waiting.append(following)
    return sources


def _warn(message: str) -> None:
    # All calling frames belong to the container or the autograd engine, none to user code.
    warnings.warn(message, OverlapWarning, stacklevel=2)
