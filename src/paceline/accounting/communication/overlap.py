"""Exposed communication of a step in closed form, for special cases of `overlap_simulator`.

Gradients become ready bucket by bucket while backward runs; each bucket is sent as soon as it is
ready and the previous transfer is over. The closed forms hold for buckets of equal size, whose
gradients become ready evenly over backward, without contention.

There are s bytes in n buckets, a bandwidth of w bytes per second, a latency of o seconds, and a
backward pass of T seconds. Bucket k (of 1 .. n) is ready at kT/n and takes c = o + s/(nw).

- If c <= T/n, the link is idle again before the next bucket is ready, and only the last bucket is
  exposed: exposed = c = o + s/(nw).
- Otherwise the link is never idle once the first bucket is ready: communication ends at T/n + nc,
  and exposed = T/n + no + s/w - T.

The two are equal where c = T/n, and the larger of both is the exposed time for every n. The first
decreases with n; the second is smallest at n = sqrt(T/o). The best n is the larger of sqrt(T/o) and
the n at which the two are equal, (T - s/w)/o. In the special case that backward takes exactly as
long as sending the bytes (T = s/w), exposed = s/(nw) + no, which is smallest for n = sqrt(s/(wo)):
buckets of sqrt(swo) bytes, and an overhead of 2 sqrt(so/w). In the limit of many buckets and no
latency, the exposed time is max(0, s/w - T), the least that any division into buckets leaves
exposed.
"""

import numpy as np
import numpy.typing as npt

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
