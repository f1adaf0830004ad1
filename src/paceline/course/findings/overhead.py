"""The overhead equation of bucketed data parallelism, with measured values if available."""

import dataclasses
from collections.abc import Iterator, Mapping

import msgspec

from paceline.accounting.explanation import Explanation
from paceline.accounting.overlap import explain_overhead
from paceline.core.finding import Finding
from paceline.course.findings.template import make_finding
from paceline.records import Record, join_key
from paceline.reports.evidence.groups import Evidence
from paceline.reports.evidence.provenance import describe_topology
from paceline.reports.evidence.strategies import OVER, has_peers

_NEEDED = {
    "gradient_bytes": "total_bytes",
    "algorithm_bandwidth_bytes_per_s": "bytes_per_s",
    "latency_s": "latency_s",
}
"""The equation's argument for each metric of a prediction."""
# Used without measurements: a model of 2e9 float32 parameters on fast links.
_EXAMPLE = {"total_bytes": 8e9, "bytes_per_s": 1e11, "latency_s": 2e-5}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overhead:
    """Inputs of the overhead equation."""

    source: str
    """Origin of the figures."""
    figures: Mapping[str, float]
    without: Record | None = None
    """The same step without communication, which gives the time of backward."""

    @property
    def working(self) -> tuple[Explanation, ...]:
        """The worked equation, and a second time with the measured backward if there is one."""
        balanced = explain_overhead(**self.figures)
        if self.without is None:
            return (balanced,)
        backward_s = _backward_seconds(self.without)
        return balanced, explain_overhead(**self.figures, backward_s=backward_s)


def find_overhead(evidence: Evidence) -> Overhead:
    """Returns the inputs from the first complete prediction, or an example without one."""
    for record in evidence.predictions("ddp"):
        # A fit with zero slope gives no bandwidth; a fit through the origin gives no latency.
        figures = {
            name: metric.value
            for key, name in _NEEDED.items()
            if (metric := record.metrics.get(key)) is not None and metric.value > 0
        }
        if len(figures) < len(_NEEDED) or not has_peers(record):
            continue
        same = [
            each
            for each in evidence.find("ddp", strategy="none")
            if each.metrics and _backward_seconds(each) > 0 and _is_same_step(each, record)
        ]
        source = f"measured values: {record.case['model']} on {describe_topology(record)}"
        return Overhead(source=source, figures=figures, without=same[-1] if same else None)
    source = "values of an example: 2e9 parameters in float32, 100 GB/s, 20 µs per call"
    return Overhead(source=source, figures=_EXAMPLE)


def _is_same_step(without: Record, record: Record) -> bool:
    """Returns whether two records differ only in strategy and bucket size."""
    case = {**without.case, **{field: record.case[field] for field in OVER}}
    return join_key(msgspec.structs.replace(without, case=case)) == join_key(record)


def overhead_findings(overhead: Overhead) -> Iterator[Finding]:
    """Yields the overhead equation and the best bucket size under each assumption."""
    balanced, *measured = (working.values for working in overhead.working)
    yield make_finding(
        "overhead_equation",
        "With t = s/(n w), bucket k is ready at k t and its all-reduce takes t + o. The last "
        "all-reduce ends at (n + 1) t + n o and backward ends at n t: the difference, "
        "s/(n w) + n o, is the overhead.",
        "Do not confuse the overhead with the total time, or with the number of buckets alone.",
    )
    yield make_finding(
        "best_bucket_balanced",
        "If computing the gradients of a bucket takes as long as sending them, as the equation "
        "assumes, {num_buckets} buckets of {bucket_bytes} are best, with {overhead_s} of overhead.",
        "Half the latency per call makes the best buckets 1.4 times smaller; twice the bandwidth "
        "makes them 1.4 times larger."
        if balanced["num_buckets"] >= 1
        else "The latency of one call exceeds the time to send all bytes: send one bucket.",
        **balanced,
    )
    if overhead.without is not None:
        (best,), figures, case = measured, overhead.figures, overhead.without.case
        yield make_finding(
            "best_bucket_measured",
            "At batch {batch} and context {context}, backward without communication takes "
            "{backward_s}, and sending the bytes takes {sending_s}. If gradients become ready "
            "evenly over backward, {num_buckets} buckets of {bucket_bytes} are best and leave "
            "{overhead_s} exposed.",
            backward_s=_backward_seconds(overhead.without),
            batch=str(case["batch"]),
            context=str(case["context"]),
            sending_s=figures["total_bytes"] / figures["bytes_per_s"],
            **best,
        )


def _backward_seconds(record: Record) -> float:
    return record.metrics["backward_time_s"].value
