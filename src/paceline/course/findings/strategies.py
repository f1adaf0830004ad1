"""Findings about data-parallel strategies: communication after backward and during backward."""

from collections.abc import Iterator, Mapping, Sequence

from paceline.core.finding import Finding
from paceline.course.findings.links import link_finding
from paceline.course.findings.template import ALIKE, make_finding, standing
from paceline.records import Record, join_key
from paceline.records.links import is_loopback
from paceline.reports.evidence.fields import case_number, strategy_text
from paceline.reports.evidence.strategies import (
    EXPOSED,
    exposed_seconds,
    of_strategies,
    step_seconds,
    strategy_ratio,
)

_RIVALS = {
    "naive": "one all-reduce per parameter after backward",
    "flat": "one all-reduce after backward",
    "overlapped": "one all-reduce per parameter during backward",
    "torch_ddp": "torch's DistributedDataParallel",
}
_CLOSE = {"alike": "no clear difference from", "unknown": "too few samples to compare with"}
"""Wording for bucket sizes that may be as good as the best, by verdict."""


def naive_findings(group: Sequence[Record]) -> Iterator[Finding]:
    """Yields the cost of one all-reduce per parameter, against a step without communication."""
    (naive,) = of_strategies(group, "naive")
    step_s, exposed_s = step_seconds(naive), exposed_seconds(naive)
    yield make_finding(
        "exposed_communication",
        "Of a step of {step_s}, {exposed_s} ({exposed_share}) is exposed communication: "
        "{num_messages} all-reduces, one per parameter, after backward.",
        step_s=step_s,
        exposed_s=exposed_s,
        exposed_share=exposed_s / step_s,
        num_messages=naive.metrics["num_messages"].value,
    )
    yield from (_against_none(naive, none) for none in of_strategies(group, "none"))
    gradient_bytes = naive.metrics["gradient_bytes"].value
    if exposed_s > 0 and gradient_bytes > 0:
        yield link_finding(naive, gradient_bytes, exposed_s)


def flat_findings(group: Sequence[Record]) -> Iterator[Finding]:
    """Yields the gain of a single all-reduce: the same bytes, fewer calls, one more copy."""
    naive, flat = of_strategies(group, "naive", "flat")
    yield make_finding(
        "flat_step",
        "With one all-reduce instead of {num_messages}, step time goes from {naive_step_s} to "
        "{flat_step_s}: {ratio}.",
        num_messages=naive.metrics["num_messages"].value,
        naive_step_s=step_seconds(naive),
        flat_step_s=step_seconds(flat),
        ratio=strategy_ratio(flat, naive),
    )
    yield make_finding(
        "flat_exposed_communication",
        "Exposed communication goes from {naive_exposed_s} to {flat_exposed_s}: {ratio}. One "
        "all-reduce saves the latency of many calls but copies all gradients.",
        "All communication is still after backward: only overlap can hide it.",
        naive_exposed_s=exposed_seconds(naive),
        flat_exposed_s=exposed_seconds(flat),
        ratio=strategy_ratio(flat, naive, EXPOSED),
    )


def overlap_findings(records: Sequence[Record], predictions: Sequence[Record]) -> Iterator[Finding]:
    """Yields the best bucket size against the other strategies and against its prediction."""
    buckets = of_strategies(records, "bucketed")
    best = min(buckets, key=step_seconds)
    yield _best_bucket(best, buckets)
    yield _exposed(best)
    yield from (_against_none(best, none) for none in of_strategies(records, "none"))
    for strategy in _RIVALS:
        if rivals := of_strategies(records, strategy):
            yield _against(best, min(rivals, key=step_seconds))
    yield _prediction(buckets, predictions)
    if is_loopback(best.case):
        yield make_finding(
            "loopback",
            "On one host, {world_size} ranks communicate on the same processors that compute, so "
            "overlap can hide little.",
            "To measure overlap, use shaped links (paceline lab run) or GPUs.",
            world_size=case_number(best, "world_size"),
        )


def _best_bucket(best: Record, buckets: Sequence[Record]) -> Finding:
    close: dict[str, list[str]] = {}
    for record in buckets:
        ratio = None if record is best else strategy_ratio(record, best)
        if ratio is not None and ratio.standing in _CLOSE:
            close.setdefault(_CLOSE[ratio.standing], []).append(strategy_text(record))
    return make_finding(
        "best_bucket",
        "Bucket sizes measured: {num_sizes}. {strategy} has the shortest step, {step_s}{close}.",
        strategy=strategy_text(best),
        num_sizes=len(buckets),
        step_s=step_seconds(best),
        close="".join(f"; {verdict} {', '.join(names)}" for verdict, names in close.items()),
    )


def _exposed(best: Record) -> Finding:
    communication = best.metrics.get("communication_s")
    return make_finding(
        "exposed_communication",
        "With {strategy}, {exposed_s} of communication is exposed; without overlap, the same "
        "communication takes {communication_s}.",
        strategy=strategy_text(best),
        exposed_s=exposed_seconds(best),
        communication_s=None if communication is None else communication.value,
    )


def _against_none(record: Record, none: Record) -> Finding:
    """Returns the total cost of communication: exposed time plus slower compute."""
    exposed_s = exposed_seconds(record)
    return make_finding(
        "step_against_none",
        "A step with {strategy} takes {ratio} as long as a step without communication "
        "({none_step_s}); besides {exposed_s} of exposed communication, the two differ by "
        "{slowdown_s}.",
        strategy=strategy_text(record),
        ratio=strategy_ratio(record, none),
        none_step_s=step_seconds(none),
        exposed_s=exposed_s,
        slowdown_s=step_seconds(record) - step_seconds(none) - exposed_s,
    )


def _against(best: Record, rival: Record) -> Finding:
    strategy = str(rival.case["strategy"])
    return make_finding(
        f"step_against_{strategy}",
        "A step with {strategy} takes {ratio} as long as a step with {rival} ({what}: "
        "{rival_step_s}, of which {rival_exposed_s} exposed).",
        strategy=strategy_text(best),
        ratio=strategy_ratio(best, rival),
        rival=strategy_text(rival),
        what=_RIVALS[strategy],
        rival_step_s=step_seconds(rival),
        rival_exposed_s=exposed_seconds(rival),
    )


def _prediction(buckets: Sequence[Record], predictions: Sequence[Record]) -> Finding:
    predicted = {join_key(record): exposed_seconds(record) for record in predictions}
    known = [record for record in buckets if join_key(record) in predicted]
    if not known:
        return make_finding(
            "no_prediction",
            "For {num_sizes} bucket sizes there is no prediction of the overlap model.",
            "Add --bucket-size-mb auto to the run: it measures what the overlap model needs.",
            num_sizes=len(buckets),
        )

    def error_s(record: Record) -> float:
        return abs(predicted[join_key(record)] - exposed_seconds(record))

    worst = max(known, key=error_s)
    return make_finding(
        "prediction_error",
        "The overlap model predicts the exposed communication of {num_alike} of {num_sizes} "
        "bucket sizes within {tolerance_share}. The model is furthest off at {strategy}: "
        "{predicted_s} predicted, {measured_s} measured; the difference is {error_share} of the "
        "step.",
        num_alike=sum(
            exposed_seconds(each) > 0
            and standing(predicted[join_key(each)], exposed_seconds(each)) == "alike"
            for each in known
        ),
        num_sizes=len(known),
        tolerance_share=ALIKE,
        strategy=strategy_text(worst),
        predicted_s=predicted[join_key(worst)],
        measured_s=exposed_seconds(worst),
        error_share=error_s(worst) / step_seconds(worst),
    )


def trace_findings(waiting_least: Mapping[str, Record]) -> list[Finding]:
    """Returns the overlapped share of communication by strategy, on the rank that waits least."""
    findings = []
    for name, record in waiting_least.items():
        overlapped = record.metrics.get("overlapped_communication_s")
        if overlapped is None:
            continue
        exposed_s = exposed_seconds(record)
        communication_s = overlapped.value + exposed_s
        findings.append(
            make_finding(
                "overlap_in_trace",
                "{strategy}: on the rank that waits least, {exposed_s} of communication is "
                "exposed; {overlapped_share} of {communication_s} of communication overlaps with "
                "compute.",
                strategy=name,
                exposed_s=exposed_s,
                communication_s=communication_s,
                overlapped_share=overlapped.value / communication_s if communication_s else 0.0,
            )
        )
    return sorted(findings, key=lambda finding: finding.figures["overlapped_share"])
