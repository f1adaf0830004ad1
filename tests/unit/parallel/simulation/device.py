"""A simulated device: its streams, its events, and the messages between its ranks.

Work of a stream runs as soon as it is asked for, so that the order of a program is the order of
its stream. A message is not part of that order: it is delivered whenever the scheduler likes, but
before the stream goes on that has waited for it. Waiting in one stream orders no other.
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
    """Work in the order in which it was asked for."""

    def __init__(self, *, computes: bool) -> None:
        self.computes = computes
        """Whether the program's own work runs in it, which then stands still while it waits."""
        self.awaited: set[Message] = set()


class Event:
    """A point in a stream: whoever waits for it has waited for all that the stream had."""

    def __init__(self, stream: Stream) -> None:
        self.awaited = set(stream.awaited)


class Device:
    """What all ranks share: the messages on their way, and who may touch what.

    Args:
        scheduler: Whose ranks it serves.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        scheduler.network = self
        self._of_thread = threading.local()
        self._streams = [Stream(computes=True) for _ in range(scheduler.num_ranks)]
        self.launches: list[list[str]] = [[] for _ in range(scheduler.num_ranks)]
        """What each rank has launched, over all groups, in its order."""
        self._sent: dict[str, list[Message]] = defaultdict(list)
        """Messages of a group that were not delivered."""
        self._num_launched: dict[tuple[str, int], int] = defaultdict(int)
        self._num_delivered: dict[str, int] = defaultdict(int)

    def serve(self, rank: int) -> None:
        """Tells the device which rank the current thread is."""
        self._of_thread.rank = rank

    @property
    def rank(self) -> int:
        """The rank that runs."""
        rank: int = self._of_thread.rank
        return rank

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Lets the rank that runs work in another stream."""
        before = self._streams[self.rank]
        self._streams[self.rank] = stream
        try:
            yield
        finally:
            self._streams[self.rank] = before

    def current_stream(self, _device: torch.device | None = None) -> Stream:
        """Returns the stream that the rank that runs works in."""
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
        """Forgets what is over; what is not is a violation: somebody was to wait for it."""
        if left := [m for messages in self._sent.values() for m in messages if not m.is_delivered]:
            raise ViolationError(f"nobody waited for {', '.join(m.name for m in left)}")
        for launches in self.launches:
            launches.clear()
        for stream in self._streams:
            stream.awaited.clear()

    def clear(self) -> None:
        """Forgets everything, as after a violation."""
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
    ) -> "SimulatedWork":
        """Launches a rank's side of the next message of a group."""
        rank = self.rank
        sizes = "+".join(str(tensor.numel()) for tensor in inputs)
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
        """Returns what could arrive now: of each group, the first message that is not delivered."""
        found = []
        for group, sent in self._sent.items():
            if sent and sent[0].is_launched:
                found.append(lambda group=group: self._deliver(group))
        return found

    def pending(self) -> str:
        """Says what is on its way."""
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
        """Streams of several communicators wait for each other if ranks launch in other orders."""
        place = len(self.launches[rank])
        self.launches[rank].append(launched)
        for other, launches in enumerate(self.launches):
            if len(launches) > place and launches[place] != launched:
                raise ViolationError(
                    f"launch {place} of rank {rank} is {launched}, of rank {other} "
                    f"{launches[place]}"
                )


def _unseen() -> contextlib.AbstractContextManager[object]:
    """Hides what the device itself computes from whoever follows what a program does."""
    if _get_current_dispatch_mode() is None:
        return contextlib.nullcontext()
    return _disable_current_modes()


class SimulatedWork(dist.Work):
    """A message as its rank knows it; it never says that it is complete."""

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
