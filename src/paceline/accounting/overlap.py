"""Exposed communication of a step: in closed form, by simulation, and the batch that hides it.

Gradients become ready bucket by bucket while backward runs; each bucket is sent as soon as it is
ready and the previous transfer is over. `simulate_overlap` simulates this event by event: a
transfer starts after a given number of compute segments, and a segment may have to wait for
transfers. While both are in progress, the transfer takes `slowdown` times as long, and compute
loses the fraction `lost_share` of its speed. Without contention the end of bucket k is
finish[k] = max(ready[k], finish[k-1]) + transfer[k] (`simulate_buckets`).

The closed forms hold without contention, for n equal buckets of s bytes in all that become ready
evenly over a backward pass of T seconds. With a bandwidth of w bytes per second and a latency of o
seconds, bucket k is ready at kT/n and takes c = o + s/(nw):

- If c <= T/n, the link is idle again before the next bucket is ready, and only the last bucket is
  exposed: exposed = c = o + s/(nw).
- Otherwise the link is never idle once the first bucket is ready: communication ends at T/n + nc,
  and exposed = T/n + no + s/w - T.

The larger of both is the exposed time for every n. The best n is the larger of sqrt(T/o), the
minimum of the second, and (T - s/w)/o, where the two are equal. If backward takes exactly as long
as sending the bytes (T = s/w), exposed = s/(nw) + no: buckets of sqrt(swo) bytes are best, with an
overhead of 2 sqrt(so/w). With many buckets and no latency the exposed time is max(0, s/w - T), the
least that any division into buckets leaves exposed.

The smallest batch at which a mesh is compute-bound has the notation of the scaling book for TPUs: a
feed-forward layer of width F on N = X Y devices, with X-way FSDP, Y-way tensor parallelism and B
tokens per step. gamma is the FLOPs of a device per byte over one link; M_X and M_Y are the numbers
of network axes that each dimension of the mesh may use.

    FSDP alone      B / X > gamma / M_X
    tensor alone    Y < M_Y F / gamma
    both            F / (Y M_X) + B / (X M_Y) < B F / (N gamma)

The left side of the last line is the time to gather weights plus the time to exchange activations;
if they overlap, the larger one counts. The best split of N has X = sqrt(B N M_X / (F M_Y)).
"""

import bisect
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from paceline.accounting.collectives import Numbers
from paceline.accounting.explanation import Explanation, WorkedLine
from paceline.core.units import format_binary_bytes, format_decimal, format_seconds

Array = npt.NDArray[np.float64]


def exposed_s(
    *,
    total_bytes: float,
    bytes_per_s: float,
    latency_s: float,
    backward_s: float,
    num_buckets: npt.ArrayLike,
) -> Array:
    """Returns the exposed seconds with equal buckets: max(o + s/(nw), T/n + no + s/w - T)."""
    n = np.asarray(num_buckets, dtype=np.float64)
    line_s = total_bytes / bytes_per_s
    return np.maximum(latency_s + line_s / n, backward_s / n + n * latency_s + line_s - backward_s)


def least_exposed_s(communication_s: npt.ArrayLike, compute_s: npt.ArrayLike) -> Array:
    """Returns the exposed seconds with many buckets and no latency: the excess over compute."""
    return np.maximum(np.subtract(communication_s, compute_s), 0.0)


def optimal_num_buckets(
    *, total_bytes: float, bytes_per_s: float, latency_s: float, backward_s: float
) -> float:
    """Returns the number of equal buckets that exposes least: max(sqrt(T/o), (T - s/w)/o)."""
    line_s = total_bytes / bytes_per_s
    return max(1.0, float(np.sqrt(backward_s / latency_s)), (backward_s - line_s) / latency_s)


def balanced_overhead_s(
    *, total_bytes: float, bytes_per_s: float, latency_s: float, num_buckets: npt.ArrayLike
) -> Array:
    """Returns the overhead if computing a bucket takes as long as sending it: s/(nw) + no."""
    n = np.asarray(num_buckets, dtype=np.float64)
    return total_bytes / (n * bytes_per_s) + n * latency_s


def balanced_bucket_bytes(*, total_bytes: float, bytes_per_s: float, latency_s: float) -> float:
    """Returns the bucket size that minimizes `balanced_overhead_s`: sqrt(swo)."""
    return float(np.sqrt(total_bytes * bytes_per_s * latency_s))


def explain_overhead(
    *, total_bytes: float, bytes_per_s: float, latency_s: float, backward_s: float | None = None
) -> Explanation:
    """Explains the time that communication adds to a step, and the buckets that minimize it.

    Without `backward_s`, computing a bucket is assumed to take as long as sending its bytes.
    """
    options = {"total_bytes": total_bytes, "bytes_per_s": bytes_per_s, "latency_s": latency_s}
    given = (
        f"s = {format_decimal(total_bytes, 'B')}, w = {format_decimal(bytes_per_s, 'B/s')}, "
        f"o = {format_seconds(latency_s)}"
    )
    if backward_s is None:
        num_buckets = total_bytes / balanced_bucket_bytes(**options)
        least = float(balanced_overhead_s(**options, num_buckets=num_buckets))
        assumption = "computing a bucket takes as long as sending its bytes"
        overhead = (
            "overhead(n) = s / (n w) + n o",
            "n buckets; after backward, only the bytes of the last one are left to send",
            "a sum that falls with n, then rises",
        )
        best, value = (
            "n* = sqrt(s / (w o)), bucket* = sqrt(s w o)",
            "overhead(n*) = 2 sqrt(s o / w)",
        )
    else:
        num_buckets = optimal_num_buckets(**options, backward_s=backward_s)
        least = float(exposed_s(**options, backward_s=backward_s, num_buckets=num_buckets))
        given += f", T = {format_seconds(backward_s)}"
        assumption = "gradients become ready evenly over backward of T seconds"
        overhead = (
            "exposed(n) = max(o + s / (n w), T / n + n o + s / w - T)",
            "only the last bucket is left to send, or the link is busy without a pause",
            "a maximum that falls with n, then rises",
        )
        best, value = "n* = max(sqrt(T / o), (T - s / w) / o)", "exposed(n*)"
    bucket_bytes = total_bytes / num_buckets
    buckets = f"{num_buckets:.1f} buckets of {format_binary_bytes(bucket_bytes)}"
    lines = (overhead, (best, given, buckets), (value, given, format_seconds(least)))
    return Explanation(
        question="Time that communication adds to a data-parallel step",
        assumptions=(assumption, "buckets of equal size, sent one after the other"),
        steps=tuple(WorkedLine(*line) for line in lines),
        values={"num_buckets": num_buckets, "bucket_bytes": bucket_bytes, "overhead_s": least},
    )


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


Communications = Literal["add", "overlap"]
"""Whether the two dimensions communicate one after the other (add) or concurrently (overlap)."""


def smallest_batch_tokens(
    gamma: Numbers,
    d_ff: Numbers,
    *,
    fsdp: Numbers,
    tensor: Numbers,
    fsdp_axes: Numbers,
    tensor_axes: Numbers,
    communications: Communications,
) -> Any:
    """Returns the B above which a given mesh is compute-bound; infinite if no B is enough."""
    fsdp, tensor, width = (np.asarray(each, dtype=np.float64) for each in (fsdp, tensor, d_ff))
    compute = width / (fsdp * tensor * gamma)
    weights = width / (tensor * fsdp_axes)
    activations = 1 / (fsdp * tensor_axes)
    spare = compute - activations
    needed = weights / (spare if communications == "add" else compute)
    return np.where(spare > 0, needed, np.inf)


def smallest_batch_tokens_of_any_mesh(
    gamma: Numbers,
    d_ff: Numbers,
    *,
    num_devices: Numbers,
    fsdp_axes: Numbers,
    tensor_axes: Numbers,
    communications: Communications,
) -> Any:
    """Returns the B above which the best split of the devices is compute-bound.

    At the best split both communications equal sqrt(F B / (N M_X M_Y)), so that
    B = N gamma² / (F M_X M_Y) if they overlap, and four times that if they add.
    """
    needed = np.asarray(num_devices, dtype=np.float64) * np.square(gamma, dtype=np.float64)
    together = needed / (np.asarray(d_ff, dtype=np.float64) * fsdp_axes * tensor_axes)
    return together * (4 if communications == "add" else 1)


def best_fsdp(
    batch_tokens: Numbers,
    d_ff: Numbers,
    *,
    num_devices: Numbers,
    fsdp_axes: Numbers,
    tensor_axes: Numbers,
) -> Any:
    """Returns the X of the best split, sqrt(B N M_X / (F M_Y)), not rounded."""
    ratio = np.multiply(batch_tokens, fsdp_axes) / np.multiply(d_ff, tensor_axes)
    return np.sqrt(ratio * num_devices)
