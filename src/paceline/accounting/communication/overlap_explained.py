"""The overhead of bucketed data parallelism as one explained result.

The formulas are those of `paceline.accounting.communication.overlap`.
"""

import numpy as np

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
        bucket_bytes = balanced_bucket_bytes(**options)
        num_buckets = total_bytes / bucket_bytes
        least = float(balanced_overhead_s(**options, num_buckets=num_buckets))
        steps = (
            WorkedLine(
                formula="overhead(n) = s / (n w) + n o",
                numbers="n buckets, of which only the last one's bytes are left to send at the end",
                result="a sum that falls with n, then rises",
            ),
            WorkedLine(
                formula="n* = sqrt(s / (w o)), bucket* = sqrt(s w o)",
                numbers=given,
                result=f"{num_buckets:.1f} buckets of {format_binary_bytes(bucket_bytes)}",
            ),
            WorkedLine(
                formula="overhead(n*) = 2 sqrt(s o / w)",
                numbers=given,
                result=format_seconds(least),
            ),
        )
        assumption = "computing a bucket takes as long as sending its bytes"
    else:
        num_buckets = optimal_num_buckets(**options, backward_s=backward_s)
        bucket_bytes = total_bytes / num_buckets
        least = float(
            np.asarray(exposed_s(**options, backward_s=backward_s, num_buckets=num_buckets))
        )
        given += f", T = {format_seconds(backward_s)}"
        steps = (
            WorkedLine(
                formula="exposed(n) = max(o + s / (n w), T / n + n o + s / w - T)",
                numbers="only the last bucket left to send, or a line that never rests",
                result="a maximum that falls with n, then rises",
            ),
            WorkedLine(
                formula="n* = max(sqrt(T / o), (T - s / w) / o)",
                numbers=given,
                result=f"{num_buckets:.1f} buckets of {format_binary_bytes(bucket_bytes)}",
            ),
            WorkedLine(formula="exposed(n*)", numbers=given, result=format_seconds(least)),
        )
        assumption = "gradients become ready evenly over backward of T seconds"
    return Explanation(
        question="Time that communication adds to a data-parallel step",
        assumptions=(assumption, "buckets of equal size, sent one after the other"),
        steps=steps,
        values={"num_buckets": num_buckets, "bucket_bytes": bucket_bytes, "overhead_s": least},
    )
