"""Measures how compute and communication slow each other down when they overlap.

Phases, on every rank: matmuls; then messages, one after the other; then messages again, with
matmuls running until each has arrived. The compute time lost is the duration of the third phase
minus the time that its matmuls take in the first. The slowdown of messages is the duration of the
third phase over that of the second.
"""

import dataclasses
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from paceline.benchmarks.collectives import CollectiveTimes
from paceline.core.strategies import Operation
from paceline.core.units import MIB
from paceline.parallel.ranks.collectives import (
    mean_over_ranks,
    resolve_group,
    start_all_gather,
    start_reduce_scatter,
)
from paceline.parallel.ranks.pending import Pending

_MESSAGE_BYTES = 4 * MIB
_MOST_MESSAGES = 300
# Few and long: after a pause, ranks may share a core for a tenth of a second before the scheduler
# separates them.
_REPETITIONS = 4
# A matmul takes a quarter of a millisecond on a core. It must be short: an arrival is noticed only
# when a matmul is over, and the delay counts as slowdown.
_MATMUL_WIDTH = 256
_MATMULS = 400


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContentionTimes:
    """Results of one operation, identical on all ranks."""

    size_bytes: int
    lost_s_per_byte: list[float]
    """Compute seconds lost per byte sent at the same time, one value per repetition."""
    slowdown: list[float]
    """Time of messages with concurrent matmuls over their time without, per repetition."""


class _Together:
    """Matmuls and messages of one rank."""

    def __init__(self, operation: Operation, device: torch.device) -> None:
        self._device = device
        self._group = resolve_group(None)
        world_size = dist.get_world_size()
        num_elements = _MESSAGE_BYTES // 4 // world_size * world_size
        self.message = torch.zeros(num_elements, device=device)
        borders = range(0, num_elements + 1, num_elements // world_size)
        starts: dict[Operation, Callable[[], Pending]] = {
            "all_reduce": self._start_all_reduce,
            "reduce_to_owners": lambda: start_reduce_scatter(self.message, self._group),
            "gather_from_owners": lambda: start_all_gather(self.message, borders, self._group),
        }
        self._start = starts[operation]
        self._factors = torch.randn(2, _MATMUL_WIDTH, _MATMUL_WIDTH, device=device)

    def _start_all_reduce(self) -> Pending:
        work = dist.all_reduce(self.message, group=self._group, async_op=True)
        return Pending("all-reduce", self.message.nbytes, [work], self._device)

    def _multiply(self) -> None:
        torch.mm(self._factors[0], self._factors[1])
        self._wait_for_matmuls()

    def _wait_for_matmuls(self) -> None:
        """Waits only for the current stream: a device-wide wait would include messages."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def matmul_s(self) -> float:
        """Returns the seconds of one matmul, with no message in flight."""
        began = time.perf_counter()
        for _ in range(_MATMULS):
            self._multiply()
        return (time.perf_counter() - began) / _MATMULS

    def messages_s(self, num_messages: int) -> float:
        """Returns the seconds of `num_messages` messages, one after the other."""
        dist.barrier()
        began = time.perf_counter()
        for _ in range(num_messages):
            self._start().wait()
            # On a GPU, wait() only blocks the stream.
            self._wait_for_matmuls()
        return time.perf_counter() - began

    def together_s(self, num_messages: int) -> tuple[float, int]:
        """Returns the seconds of messages with concurrent matmuls, and the number of matmuls."""
        dist.barrier()
        num_matmuls = 0
        began = time.perf_counter()
        for _ in range(num_messages):
            pending = self._start()
            while not pending.is_completed():
                self._multiply()
                num_matmuls += 1
            pending.wait()
            self._wait_for_matmuls()
        return time.perf_counter() - began, num_matmuls


def measure_contention(
    device: torch.device, operation: Operation, undisturbed: CollectiveTimes, time_limit_s: float
) -> ContentionTimes:
    """Measures one operation, with all phases in the time limit; all ranks call it together.

    The number of messages is derived from `undisturbed`, the times of messages of a similar size
    without concurrent compute.
    """
    together = _Together(operation, device)
    expected_s = sorted(undisturbed.samples)[len(undisturbed.samples) // 2]
    expected_s *= together.message.nbytes / undisturbed.size_bytes
    num_messages = int(time_limit_s / _REPETITIONS / 2 / expected_s)
    num_messages = max(1, min(num_messages, _MOST_MESSAGES))
    sent = num_messages * together.message.nbytes
    together.matmul_s()
    together.together_s(1)
    lost, slower = [], []
    for _ in range(_REPETITIONS):
        before_s = together.matmul_s()
        messages_s = together.messages_s(num_messages)
        both_s, num_matmuls = together.together_s(num_messages)
        one_matmul_s = (before_s + together.matmul_s()) / 2
        lost.append(max(0.0, both_s - num_matmuls * one_matmul_s) / sent)
        slower.append(both_s / messages_s)
    return ContentionTimes(
        size_bytes=together.message.nbytes,
        lost_s_per_byte=mean_over_ranks(lost, device),
        slowdown=mean_over_ranks(slower, device),
    )
