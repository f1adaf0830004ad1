"""Ranks that are threads of the test's process, with everything that checkpoints send each other.

A save runs on the thread of its rank. Messages between two ranks arrive in order, no earlier than
both sides have started them, and only for a rank that waits.
"""

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from paceline.checkpoint.checkpointer import _Saving
from tests.unit.parallel.simulation.device import Device
from tests.unit.parallel.simulation.group import simulated_ranks
from tests.unit.parallel.simulation.object_collectives import object_collectives
from tests.unit.parallel.simulation.scheduler import Scheduler

Pair = tuple[int, int]


class Letter:
    """One side of a message between two ranks."""

    def __init__(self, post: "Post", pair: Pair, place: int) -> None:
        self._post = post
        self._pair = pair
        self._place = place
        self.num_waits = 0

    def wait(self) -> None:
        """Blocks the rank until the message has arrived."""
        self.num_waits += 1
        self._post.deliver(self._pair, self._place)


class Post:
    """Messages between two ranks: replaces `isend` and `irecv`."""

    def __init__(self, scheduler: Scheduler, device: Device) -> None:
        self._scheduler = scheduler
        self._device = device
        self._sent: dict[Pair, list[Tensor]] = collections.defaultdict(list)
        self._rooms: dict[Pair, list[Tensor]] = collections.defaultdict(list)
        self.letters: list[Letter] = []
        self.delivered: dict[Pair, int] = collections.Counter()
        """Bytes that arrived, by sender and receiver."""

    def isend(self, content: Tensor, *, group: object, group_dst: int) -> Letter:
        """Starts to send."""
        return self._posted(self._sent, (self._device.rank, group_dst), content)

    def irecv(self, room: Tensor, *, group: object, group_src: int) -> Letter:
        """Starts to receive."""
        return self._posted(self._rooms, (group_src, self._device.rank), room)

    def _posted(self, side: dict[Pair, list[Tensor]], pair: Pair, tensor: Tensor) -> Letter:
        assert pair[0] != pair[1], "a rank sends nothing to itself"
        side[pair].append(tensor)
        letter = Letter(self, pair, len(side[pair]) - 1)
        self.letters.append(letter)
        self._scheduler.switch(self._device.rank)
        return letter

    def deliver(self, pair: Pair, place: int) -> None:
        """Blocks a rank until both sides of a message are there, and copies it."""
        sent, rooms = self._sent[pair], self._rooms[pair]
        self._scheduler.wait(self._device.rank, lambda: min(len(sent), len(rooms)) > place)
        content, room = sent[place], rooms[place]
        assert content.shape == room.shape, "the sides of a message differ in size"
        if room.data_ptr() != content.data_ptr():
            room.copy_(content)
            self.delivered[pair] += room.numel()
        rooms[place] = content

    def require_awaited(self) -> None:
        """Raises unless each side of each message was waited for exactly once."""
        assert {letter.num_waits for letter in self.letters} <= {1}


@dataclasses.dataclass
class Ranks:
    """Ranks that run programs, one program after another."""

    scheduler: Scheduler
    device: Device
    post: Post
    destroyed: list[dist.ProcessGroup]
    """Process groups that ranks have destroyed."""

    def run(self, program: Callable[[int], Any], seed: int = 0) -> list[Any]:
        """Returns what a program returns on each rank, in the order of a seed."""
        return self.scheduler.run(program, seed)


def new_simulated_group() -> dist.ProcessGroup | None:
    """Returns a group of all ranks that are threads."""
    return dist.new_group(backend="simulated")


@contextlib.contextmanager
def checkpoint_ranks(num_ranks: int) -> Iterator[Ranks]:
    """Runs ranks as threads that save and load checkpoints together."""
    with simulated_ranks(num_ranks) as (scheduler, device), contextlib.ExitStack() as patches:
        post = Post(scheduler, device)
        destroyed: list[dist.ProcessGroup] = []
        for module in ("checkpointer", "memory"):
            patches.enter_context(
                mock.patch(f"paceline.checkpoint.{module}.new_group", new_simulated_group)
            )
        for name, replacement in (
            ("destroy_process_group", destroyed.append),
            ("isend", post.isend),
            ("irecv", post.irecv),
        ):
            patches.enter_context(mock.patch.object(dist, name, replacement))
        patches.enter_context(object_collectives())
        patches.enter_context(mock.patch.object(_Saving, "start", _Saving.run))
        yield Ranks(scheduler, device, post, destroyed)
        post.require_awaited()
