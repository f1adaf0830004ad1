"""The equation of bucketed data parallelism with figures put in, measured ones where there are."""

import dataclasses

import msgspec

from paceline.accounting.communication.overlap_explained import explain_overhead
from paceline.accounting.explanation import Explanation
from paceline.core.units import format_binary_bytes, format_seconds
from paceline.records import Record, join_key
from paceline.reports.evidence.groups import Evidence
from paceline.reports.evidence.provenance import describe_topology
from paceline.reports.evidence.strategies import OVER, has_peers


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverheadFigures:
    """What the equation is filled with."""

    source: str
    """Where the figures are from."""
    total_bytes: float
    bytes_per_s: float
    latency_s: float
    without: Record | None = None
    """The same step without any communication, which tells how long backward takes."""

    def work(self) -> tuple[Explanation, ...]:
        """Works the equation out, and once more for the backward that was measured."""
        options = {
            "total_bytes": self.total_bytes,
            "bytes_per_s": self.bytes_per_s,
            "latency_s": self.latency_s,
        }
        balanced = explain_overhead(**options)
        if self.without is None:
            return (balanced,)
        return balanced, explain_overhead(**options, backward_s=_backward_seconds(self.without))


# For stores without measurements: a model of 2e9 float32 parameters on fast links.
_EXAMPLE = OverheadFigures(
    source="an example: 2e9 parameters in float32, 100 GB/s, 20 µs per call",
    total_bytes=8e9,
    bytes_per_s=1e11,
    latency_s=2e-5,
)


def overhead_figures(evidence: Evidence) -> OverheadFigures:
    """Returns what was measured of the group that a prediction was made for, or an example."""
    for record in evidence.predictions("ddp"):
        needed = ("gradient_bytes", "algorithm_bandwidth_bytes_per_s", "latency_s")
        # A fit without a slope has no bandwidth, and one through the origin no time of a call.
        figures = [record.metrics[name].value for name in needed if name in record.metrics]
        if len(figures) < len(needed) or min(figures) <= 0 or not has_peers(record):
            continue
        total_bytes, bytes_per_s, latency_s = figures
        same = [
            each
            for each in evidence.find("ddp", strategy="none")
            if each.metrics and _backward_seconds(each) > 0 and _is_same_step(each, record)
        ]
        return OverheadFigures(
            source=f"measured: {record.case['model']} on {describe_topology(record)}",
            total_bytes=total_bytes,
            bytes_per_s=bytes_per_s,
            latency_s=latency_s,
            without=same[-1] if same else None,
        )
    return _EXAMPLE


def _is_same_step(without: Record, record: Record) -> bool:
    """Returns whether records differ in nothing but the strategy, not in batch or context."""
    case = {**without.case, **{field: record.case[field] for field in OVER}}
    return join_key(msgspec.structs.replace(without, case=case)) == join_key(record)


def overhead_sentences(figures: OverheadFigures) -> list[str]:
    """Says which buckets are best, each time under what assumption."""
    balanced, *measured = (working.values for working in figures.work())
    sending = format_seconds(figures.total_bytes / figures.bytes_per_s)
    sentences = [
        "Bucket k is ready at k t and takes t + o, the last ends at (n + 1) t + n o, and "
        "backward at n t: the difference, s/(n w) + n o, is the overhead. (The total time and the "
        "number of buckets alone, as the answer is often given, are other figures.)",
    ]
    if balanced["num_buckets"] < 1:
        sentences.append(
            f"Here one call takes longer than all bytes, {sending}, so one message for all is best."
        )
    else:
        sentences.append(
            "If computing a bucket takes as long as sending its bytes, as the equation assumes, "
            f"some {balanced['num_buckets']:.0f} buckets of "
            f"{format_binary_bytes(balanced['bucket_bytes'])} are best, with "
            f"{format_seconds(balanced['overhead_s'])} of overhead; half the time of a call makes "
            "them 1.4 times smaller, twice the bandwidth 1.4 times larger."
        )
    if figures.without is not None:
        (best,), case = measured, figures.without.case
        sentences.append(
            "If gradients become ready evenly over the backward that was measured without "
            f"communication, {format_seconds(_backward_seconds(figures.without))} at batch "
            f"{case['batch']} and context {case['context']}, where the bytes need {sending}, some "
            f"{best['num_buckets']:.0f} of {format_binary_bytes(best['bucket_bytes'])} are best, "
            f"and leave {format_seconds(best['overhead_s'])}."
        )
    return sentences


def _backward_seconds(record: Record) -> float:
    return record.metrics["backward_time_s"].value
