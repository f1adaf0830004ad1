"""A simulated device: its streams, its events, and the messages between its ranks.

Work on a stream runs as soon as it is launched, so a stream follows program order. Messages do
not: the scheduler may deliver a message at any time before a stream that waits for it continues.
Waiting on one stream does not order any other stream.
"""

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from tests.unit.parallel.simulation.messages import Combine, Message, launch_side
from tests.unit.parallel.simulation.scheduler import Scheduler, ViolationError


class Stream:
    """Work in launch order."""

    def __init__(self, *, computes: bool) -> None:
        self.computes = computes
        """Whether the program itself runs on this stream, so that waiting blocks it."""
        self.awaited: set[Message] = set()


class Event:
    """A point in a stream; waiting for it includes all waits of the stream before that point."""

    def __init__(self, stream: Stream) -> None:
        self.awaited = set(stream.awaited)


class Device:
    """State shared by all ranks: their streams, launches and messages in flight.

    Args:
        scheduler: Scheduler of the ranks that use this device.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        scheduler.network = self
        self._of_thread = threading.local()
        self._streams = [Stream(computes=True) for _ in range(scheduler.num_ranks)]
        self.launches: list[list[str]] = [[] for _ in range(scheduler.num_ranks)]
        """Launches of each rank over all groups, in launch order."""
        self._sent: dict[str, list[Message]] = defaultdict(list)
        """Undelivered messages by group."""
        self._num_launched: dict[tuple[str, int], int] = defaultdict(int)
        self._num_delivered: dict[str, int] = defaultdict(int)

    def serve(self, rank: int) -> None:
        """Registers the current thread as a rank."""
        self._of_thread.rank = rank

    @property
    def rank(self) -> int:
        """The rank of the current thread."""
        rank: int = self._of_thread.rank
        return rank

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Makes `stream` the current stream of this rank."""
        before = self._streams[self.rank]
        self._streams[self.rank] = stream
        try:
            yield
        finally:
            self._streams[self.rank] = before

    def current_stream(self, _device: torch.device | None = None) -> Stream:
        """Returns the current stream of this rank."""
        return self._streams[self.rank]

    def wait_event(self, event: Event) -> None:
        """Orders the current stream behind an event."""
        for message in event.awaited:
            self.wait(message)

    def wait(self, message: Message) -> None:
        """Orders the current stream behind a message."""
        stream = self.current_stream()
        stream.awaited.add(message)
        if stream.computes:
            self._scheduler.wait(self.rank, lambda: message.is_delivered)

    def reset(self) -> None:
        """Clears finished state; an undelivered message is a violation: a rank must wait for it."""
        if left := [m for messages in self._sent.values() for m in messages if not m.is_delivered]:
            raise ViolationError(f"nobody waited for {', '.join(m.name for m in left)}")
        for launches in self.launches:
            launches.clear()
        for stream in self._streams:
            stream.awaited.clear()

    def clear(self) -> None:
        """Clears all state, as needed after a violation."""
        for launches in self.launches:
            launches.clear()
        for stream in self._streams:
            stream.awaited.clear()
        self._sent.clear()
        self._num_launched.clear()
        self._num_delivered.clear()

    def launch(
        self,
        group: str,
        ranks: Sequence[int],
        kind: str,
        *,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        combine: Combine,
        own: Tensor | None = None,
        named_by: Sequence[Tensor] | None = None,
    ) -> "SimulatedWork":
        """Launches this rank's side of the next message of a group.

        `named_by` are the tensors whose sizes all ranks must have in common; by default the inputs.
        """
        rank = self.rank
        sizes = "+".join(str(tensor.numel()) for tensor in named_by or inputs)
        name = f"{kind} of {sizes} x {inputs[0].dtype if inputs else 'nothing'}"
        self._require_same_order(rank, f"{name} among {len(ranks)}")
        place = self._num_launched[group, rank] - self._num_delivered[group]
        self._num_launched[group, rank] += 1
        sent = self._sent[group]
        if place == len(sent):
            sent.append(Message(name, ranks, combine))
        message = sent[place]
        with _unseen():
            message.sides[rank] = launch_side(inputs, outputs, own)
        self._scheduler.switch(rank)
        return SimulatedWork(self, message)

    def deliverable(self) -> list[Callable[[], None]]:
        """Returns possible deliveries: each group's first message, once all ranks launched it."""
        found = []
        for group, sent in self._sent.items():
            if sent and sent[0].is_launched:
                found.append(lambda group=group: self._deliver(group))
        return found

    def pending(self) -> str:
        """Describes the messages in flight."""
        lines = [
            f"{message.name} (launched by {sorted(message.sides)} of {list(message.ranks)})"
            for sent in self._sent.values()
            for message in sent
        ]
        return f"on its way: {', '.join(lines) or 'nothing'}"

    def _deliver(self, group: str) -> None:
        self._num_delivered[group] += 1
        with _unseen():
            self._sent[group].pop(0).deliver()

    def _require_same_order(self, rank: int, launched: str) -> None:
        """Raises if ranks launch in different orders: several communicators could then deadlock."""
        place = len(self.launches[rank])
        self.launches[rank].append(launched)
        for other, launches in enumerate(self.launches):
            if len(launches) > place and launches[place] != launched:
                raise ViolationError(
                    f"launch {place} of rank {rank} is {launched}, of rank {other} "
                    f"{launches[place]}"
                )


def _unseen() -> contextlib.AbstractContextManager[object]:
    """Hides the device's own operations from dispatch modes that trace a program."""
    if _get_current_dispatch_mode() is None:
        return contextlib.nullcontext()
    return _disable_current_modes()


class SimulatedWork(dist.Work):
    """One rank's handle of a message; it never reports completion."""

    def __init__(self, device: Device, message: Message) -> None:
        super().__init__()
        self._device = device
        self._message = message

    def is_completed(self) -> bool:
        return False

    def is_success(self) -> bool:
        return False

    def wait(self, timeout: object = None) -> bool:
        self._device.wait(self._message)
        return True
