"""Event-driven simulation of overlapping compute and communication.

Compute runs segment by segment, and transfers run one after the other. A transfer starts after a
given number of segments; a segment may have to wait for transfers. While both are in progress, the
transfer takes `slowdown` times as long, and compute loses the fraction `lost_share` of its speed.

Without contention, a backward pass whose buckets are ready at given times follows the recurrence
finish[k] = max(ready[k], finish[k-1]) + transfer[k] (`simulate_buckets`);
`paceline.accounting.communication.overlap` has its closed form for equal buckets.
"""

import bisect
import dataclasses
import itertools
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contention:
    """Mutual slowdown of compute and communication."""

    lost_s_per_byte: float
    """Compute seconds lost per byte sent at the same time."""
    slowdown: float
    """Time of a transfer during compute, relative to its time without compute."""


NO_CONTENTION = Contention(lost_s_per_byte=0.0, slowdown=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputeSegment:
    """A segment of compute."""

    seconds: float
    """Time without concurrent communication."""
    needs: int = 0
    """Number of transfers that must finish before it starts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
    """One collective."""

    seconds: float
    """Time without concurrent compute."""
    after: int
    """Number of segments that must finish before it starts."""
    num_bytes: int = 0
    contention: Contention = NO_CONTENTION

    @property
    def lost_share(self) -> float:
        """The fraction of its speed that compute loses during this transfer.

        Compute never loses more time than if it had waited for the transfer.
        """
        lost_s = min(self.contention.lost_s_per_byte * self.num_bytes, self.seconds)
        return lost_s / (self.seconds * self.contention.slowdown) if lost_s else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverlapResult:
    """Times in seconds, from the start of the first segment."""

    lost_s: float
    """Compute time lost to transfers in progress."""
    exposed_s: float
    """Time spent waiting: segments for transfers, and the end of the step for the last ones."""
    start_s: list[float]
    """Start of each transfer."""
    finish_s: list[float]
    """End of each finished transfer."""


def simulate_overlap(
    segments: Sequence[ComputeSegment], transfers: Sequence[Transfer], *, wait_for_all: bool = True
) -> OverlapResult:
    """Simulates until compute and, with `wait_for_all`, all transfers are finished."""
    num_done = 0
    compute_left = [segment.seconds for segment in segments]
    transfer_left = [transfer.seconds for transfer in transfers]
    now_s = lost_s = exposed_s = 0.0
    start_s: list[float] = []
    finish_s: list[float] = []
    while num_done < len(segments) or (wait_for_all and len(finish_s) < len(transfers)):
        current = len(finish_s)
        computes = num_done < len(segments) and current >= segments[num_done].needs
        sends = current < len(transfers) and num_done >= transfers[current].after
        if not computes and not sends:
            raise ValueError(f"segment {num_done} waits for a transfer that waits for it")
        if sends and len(start_s) == current:
            start_s.append(now_s)
        compute_pace = transfer_pace = 1.0
        if computes and sends:
            compute_pace = 1 - transfers[current].lost_share
            transfer_pace = 1 / transfers[current].contention.slowdown
        compute_s = _until_end(compute_left[num_done], compute_pace) if computes else math.inf
        transfer_s = _until_end(transfer_left[current], transfer_pace) if sends else math.inf
        elapsed_s = min(compute_s, transfer_s)
        now_s += elapsed_s
        if computes:
            lost_s += elapsed_s * (1 - compute_pace)
            compute_left[num_done] -= elapsed_s * compute_pace
        else:
            exposed_s += elapsed_s
        if sends:
            transfer_left[current] -= elapsed_s * transfer_pace
        if transfer_s == elapsed_s:
            finish_s.append(now_s)
        num_done += compute_s == elapsed_s
    return OverlapResult(lost_s=lost_s, exposed_s=exposed_s, start_s=start_s, finish_s=finish_s)


def simulate_buckets(
    ready_s: Sequence[float], transfer_s: Sequence[float], backward_s: float
) -> OverlapResult:
    """Simulates a backward pass whose buckets are ready at given times, without contention.

    Buckets are sent in index order, so that all ranks use the same order.
    """
    instants = sorted({*ready_s, backward_s})
    if instants[-1] > backward_s:
        raise ValueError(f"a bucket is ready {instants[-1] - backward_s} s after backward's end")
    segments = [
        ComputeSegment(seconds=end - start) for start, end in itertools.pairwise([0.0, *instants])
    ]
    transfers = [
        Transfer(seconds=seconds, after=bisect.bisect_right(instants, ready))
        for ready, seconds in zip(ready_s, transfer_s, strict=True)
    ]
    return simulate_overlap(segments, transfers)


def _until_end(left_s: float, pace: float) -> float:
    return left_s / pace if pace > 0 else math.inf
