"""The overhead of bucketed data parallelism as one explained result.

The formulas are those of `paceline.accounting.communication.overlap`.
"""

from paceline.accounting.communication.overlap import (
    balanced_bucket_bytes,
    balanced_overhead_s,
    exposed_s,
    optimal_num_buckets,
)
from paceline.accounting.explanation import Explanation, WorkedLine
from paceline.core.units import format_binary_bytes, format_decimal, format_seconds


def explain_overhead(
    *, total_bytes: float, bytes_per_s: float, latency_s: float, backward_s: float | None = None
) -> Explanation:
    """Explains the time that communication adds to a step, and the buckets that make it least.

    Without `backward_s`, computing a bucket takes as long as sending its bytes.
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
            "n buckets, of which only the last one's bytes are left to send at the end",
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
            "only the last bucket left to send, or a line that never rests",
            "a maximum that falls with n, then rises",
        )
        best, value = "n* = max(sqrt(T / o), (T - s / w) / o)", "exposed(n*)"
    bucket_bytes = total_bytes / num_buckets
    buckets = f"{num_buckets:.1f} buckets of {format_binary_bytes(bucket_bytes)}"
    lines = (overhead, (best, given, buckets), (value, given, format_seconds(least)))
    return Explanation(
        question="Time that communication adds to a data-parallel step",
        assumptions=(assumption, "buckets of equal size, sent one after the other"),
        steps=tuple(
            WorkedLine(formula=formula, numbers=numbers, result=result)
            for formula, numbers, result in lines
        ),
        values={"num_buckets": num_buckets, "bucket_bytes": bucket_bytes, "overhead_s": least},
    )
