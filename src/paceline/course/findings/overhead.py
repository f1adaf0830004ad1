"""The equation of bucketed data parallelism with figures put in, measured ones where there are."""

import dataclasses

import msgspec

from paceline.accounting.communication.overlap_explained import explain_overhead
from paceline.accounting.explanation import Explanation
from paceline.core.finding import Finding
from paceline.course.findings.template import make_finding
from paceline.records import Record, join_key
from paceline.reports.evidence.groups import Evidence
from paceline.reports.evidence.provenance import describe_topology
from paceline.reports.evidence.strategies import OVER, has_peers

_NEEDED = ("gradient_bytes", "algorithm_bandwidth_bytes_per_s", "latency_s")


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
        # A fit without a slope has no bandwidth, and one through the origin no latency.
        figures = [record.metrics[name].value for name in _NEEDED if name in record.metrics]
        if len(figures) < len(_NEEDED) or min(figures) <= 0 or not has_peers(record):
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


def overhead_findings(figures: OverheadFigures) -> list[Finding]:
    """Tells which buckets are best, each time under what assumption."""
    balanced, *measured = (working.values for working in figures.work())
    findings = [
        make_finding(
            "overhead_equation",
            "Bucket k is ready at k t and takes t + o, the last ends at (n + 1) t + n o, and "
            "backward at n t: the difference, s/(n w) + n o, is the overhead.",
            "The total time, or the number of buckets by itself, is another figure.",
        ),
        make_finding(
            "best_bucket_balanced",
            "If computing a bucket takes as long as sending its bytes, as the equation assumes, "
            "{num_buckets} buckets of {bucket_bytes} are best, with {overhead_s} of overhead.",
            "Half the latency of a call makes them 1.4 times smaller, twice the bandwidth 1.4 "
            "times larger."
            if balanced["num_buckets"] >= 1
            else "A call takes longer than all bytes: send one bucket.",
            **balanced,
        ),
    ]
    for best in measured:
        assert figures.without is not None
        case = figures.without.case
        findings.append(
            make_finding(
                "best_bucket_measured",
                "If gradients become ready evenly over the backward that was measured without "
                "communication, {backward_s} at batch {batch} and context {context}, where the "
                "bytes need {sending_s}, {num_buckets} buckets of {bucket_bytes} are best, and "
                "leave {overhead_s} exposed.",
                "",
                backward_s=_backward_seconds(figures.without),
                batch=str(case["batch"]),
                context=str(case["context"]),
                sending_s=figures.total_bytes / figures.bytes_per_s,
                **best,
            )
        )
    return findings


def _backward_seconds(record: Record) -> float:
    return record.metrics["backward_time_s"].value
