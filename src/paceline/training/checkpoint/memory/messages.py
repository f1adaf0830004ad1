"""Transfers bytes between ranks, in messages of bounded size."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

_MESSAGE_BYTES = 2**26


class Messages:
    """Messages in flight; those between two ranks arrive in the order they were started in.

    Args:
        group: CPU process group of the ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._under_way: list[tuple[dist.Work | None, Tensor]] = []

    def send(self, content: Tensor, rank: int) -> None:
        """Starts to send bytes, which must not change until `wait` returns."""
        self._start(content, lambda part: dist.isend(part, group=self._group, group_dst=rank))

    def receive(self, room: Tensor, rank: int) -> None:
        """Starts to receive as many bytes as `room` holds."""
        self._start(room, lambda part: dist.irecv(part, group=self._group, group_src=rank))

    def wait(self) -> None:
        """Waits until all messages have arrived."""
        for work, _ in self._under_way:
            if work is not None:
                work.wait()
        self._under_way.clear()

    def _start(self, content: Tensor, start: Callable[[Tensor], dist.Work | None]) -> None:
        assert content.dtype == torch.uint8
        for part in torch.split(content, _MESSAGE_BYTES):
            self._under_way.append((start(part), part))
