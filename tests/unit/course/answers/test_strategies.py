"""Tests that findings about data-parallel steps follow from the records."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from paceline.course.answers import strategies as answers
from paceline.records import Record
from paceline.reports.evidence.groups import Evidence
from tests.unit.course.report_cases import FEW, GPU, NOISY, ONE, STEADY, check, make_record
from tests.unit.record_factory import ENVIRONMENT

LAB = {"num_hosts": 2, "link_rate_bits_per_s": 2e9}


def _record(
    kind: str, metrics: Any, strategy: str, bucket_size_mb: float | None = None, **case: Any
) -> Record:
    fields: dict[str, Any] = {"model": "small", "batch": 4, "context": 128, "compile": "none"}
    fields |= {"strategy": strategy, "bucket_size_mb": bucket_size_mb}
    return make_record(kind, metrics, **{**fields, **case})


def _step(
    strategy: str, size: float | None = None, step: float = 1.0, exposed: float = 0.1, **case: Any
) -> Record:
    spread, alone = case.pop("spread", STEADY), case.pop("alone", 0.5)
    metrics = {"forward_time_s": step / 4, "backward_time_s": step / 2}
    metrics |= {"optimizer_time_s": step / 8, "num_messages": 75, "gradient_bytes": 1e8}
    metrics |= {"communication_s": alone, "step_time_s": [step * factor for factor in spread]}
    metrics |= {"exposed_communication_s": [exposed * factor for factor in spread]}
    return _record("ddp", metrics, strategy, size, **case)


def _naive(step: float = 1.0, exposed: float = 0.1, **options: Any) -> Record:
    return _step("naive", None, step, exposed, **options)


def _flat(step: float, exposed: float) -> list[Record]:
    return [_step("flat", None, step, exposed), _naive()]


def _buckets(*others: float, spread: Sequence[float] = STEADY) -> list[Record]:
    """Returns the best bucket size, 25 MiB, and others of 1 MiB, 2 MiB and so on."""
    sizes = [_step("bucketed", size, step, spread=spread) for size, step in enumerate(others, 1)]
    return [_step("bucketed", 25, spread=STEADY[: len(spread)]), *sizes]


def _predicted(*exposed: float) -> list[Record]:
    measured = [_step("bucketed", size, exposed=0.0172) for size in range(2)]
    predicted = [{"exposed_communication_s": seconds} for seconds in exposed]
    return measured + [_prediction(size, each) for size, each in enumerate(predicted)]


def _prediction(size: float, metrics: dict[str, float], **case: Any) -> Record:
    return _record("prediction", metrics, "bucketed", size, predicts="ddp", **case)


BUCKET = _step("bucketed", 25)
NONE = _step("none", exposed=0.0)
UNSTEADY = [_naive(1.02, spread=NOISY), NONE]
RIVALS = [_step("bucketed", 1, 1.5), BUCKET, _naive(1.02, 0.3), _step("flat", None, 0.98, 0.4)]
RIVALS += [_step("overlapped", step=1.02, spread=NOISY), _step("torch_ddp", step=2.0, spread=ONE)]
NAIVE, FLAT, OVERLAP = answers.answer_naive, answers.answer_flat, answers.answer_overlap
UNKNOWN = "; too few samples to compare with bucketed 1 MiB."
ALIKE = "; no clear difference from bucketed 1 MiB, bucketed 2 MiB."
LATER = _prediction(5, {"exposed_communication_s": 0.018})
AGAINST, EXPOSED, ERROR = "step_against_none", "exposed_communication", "prediction_error"
BEST, LINK, STEP, SENT = "best_bucket", "link_share", "flat_step", "flat_exposed_communication"


@pytest.mark.parametrize(
    ("answer", "records", "expected"),
    [
        (NAIVE, [_naive(2.0, 0.4)], {EXPOSED: {"step_s": 2, "exposed_s": 0.4, "num_messages": 75}}),
        (NAIVE, [_naive(2.0, 0.4)], {EXPOSED: {"exposed_share": 0.2}, AGAINST: None}),
        (NAIVE, [_naive(2.0, 0.4)], {"loopback": {"bus_bytes_per_s": 2.5e8}}),
        # The link needs 400 ms.
        (NAIVE, [_naive(2.0, 0.44, **LAB)], {LINK: {LINK: 0.909, "says": "within 10% (-9%)"}}),
        (NAIVE, [_naive(2.0, 0.60, **LAB)], {LINK: {LINK: 0.667, "says": "latency of calls"}}),
        (NAIVE, [_naive(1.2), NONE], {AGAINST: {"ratio": 1.2, "slowdown_s": 0.1, "says": "more"}}),
        (NAIVE, [_naive(0.9), NONE], {AGAINST: {"slowdown_s": -0.2, "none_step_s": 1.0}}),
        (NAIVE, UNSTEADY, {AGAINST: {"ratio_low": 0.714, "says": "no clear"}}),
        (FLAT, _flat(0.95, 0.05), {STEP: {"naive_step_s": 1, "flat_step_s": 0.95, "says": "less"}}),
        (FLAT, _flat(0.95, 0.05), {SENT: {"naive_exposed_s": 0.1, "flat_exposed_s": 0.05}}),
        (FLAT, _flat(1.01, 0.12), {STEP: {"ratio": 1.01}, SENT: {"ratio": 1.2, "says": "more"}}),
        (OVERLAP, [_step("bucketed", 25, 1.2), NONE], {AGAINST: {"ratio": 1.2}}),
        (OVERLAP, RIVALS, {"step_against_naive": {"rival_exposed_s": 0.3, "says": "less"}}),
        (OVERLAP, RIVALS, {"step_against_flat": {"ratio": 1 / 0.98, "rival_step_s": 0.98}}),
        (OVERLAP, RIVALS, {"step_against_overlapped": {"rival_step_s": 1.02, "says": "no clear"}}),
        (OVERLAP, RIVALS, {"step_against_torch_ddp": {"ratio": 0.5, "says": FEW}, AGAINST: None}),
        (OVERLAP, _buckets(), {BEST: {"num_sizes": 1, "says": "shortest step, 1 s."}}),
        (OVERLAP, _buckets(1.1, 1.2), {BEST: {"says": ["measured: 3.", "25 MiB has", "1 s."]}}),
        (OVERLAP, _buckets(1.1, 1.01, spread=NOISY), {BEST: {"says": ALIKE}}),
        (OVERLAP, _buckets(1.1, spread=ONE), {BEST: {"says": UNKNOWN}}),
        (OVERLAP, [BUCKET], {EXPOSED: {"exposed_s": 0.1, "communication_s": 0.5}, "loopback": {}}),
        (OVERLAP, [_step("bucketed", 25, alone=None)], {EXPOSED: {"says": "takes unknown"}}),
        (OVERLAP, [_step("bucketed", 25, **LAB)], {"loopback": None}),
        (OVERLAP, [_step("bucketed", 25, **GPU)], {"loopback": None}),
        (OVERLAP, _predicted(0.0066, 0.0172), {ERROR: {"num_alike": 1, "predicted_s": 0.0066}}),
        (OVERLAP, _predicted(0.0066, 0.0172), {ERROR: {"num_sizes": 2, "error_share": 0.0106}}),
        (OVERLAP, _predicted(0.0188, 0.0157), {ERROR: {"num_alike": 2, "measured_s": 0.0172}}),
        (OVERLAP, _predicted(0.0190, 0.0154), {ERROR: {"num_alike": 0}, "no_prediction": None}),
        (OVERLAP, [*_predicted(), LATER], {ERROR: None, "no_prediction": {"num_sizes": 2}}),
    ],
)
@pytest.mark.usefixtures("no_pictures")
def test_findings(answer: Any, records: list[Record], expected: Any) -> None:
    check(answer, records, expected)


@pytest.mark.parametrize("answer", [NAIVE, FLAT, OVERLAP])
def test_one_rank_and_failures_tell_nothing_of_communication(answer: Any) -> None:
    names: Any = (("none",), ("naive",), ("flat",), ("bucketed", 25))
    check(answer, [_step(*name, world_size=1) for name in names], {})
    check(answer, [_step(*name, world_size=1, **GPU) for name in names], {})
    check(answer, [_record("ddp", {}, *name, outcome="failed") for name in names], {})


@pytest.mark.usefixtures("no_pictures")
def test_steps_of_different_runs_are_not_compared_round_by_round() -> None:
    # Round by round, each step is 2% shorter; from run to run, the machine varies by more.
    drifting = (0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3)
    later = msgspec.structs.replace(ENVIRONMENT, time="2026-01-03T00:00:00+00:00")
    bucketed = _step("bucketed", 25.0, 0.98, spread=drifting, **LAB)
    for environment, says in ((ENVIRONMENT, "less"), (later, "no clear difference")):
        naive = _naive(spread=drifting, environment=environment, **LAB)
        expected = {"step_against_naive": {"ratio": 0.98, "says": says}}
        (block,) = check(OVERLAP, [bucketed, naive], expected)
    days = f"; 2026-01-03 to {ENVIRONMENT.time[:10]}"
    assert [line.endswith(days) for line in block.environments] == [True]


@pytest.mark.usefixtures("no_pictures")
def test_traces_tell_the_share_that_overlaps_on_the_rank_that_waits_least() -> None:
    cases = (("bucketed", 0, 0.9, 0.1), ("naive", 0, 0.0, 1.0), ("naive", 1, 0.01, 0.49))
    names = ("overlapped_communication_s", "exposed_communication_s")
    records = [
        _record("timeline", dict(zip(names, times, strict=True)), strategy, rank=rank)
        for strategy, rank, *times in cases
    ]
    (traced,) = answers.answer_traces(Evidence.of(records))
    assert [
        (each.message.split(":")[0], each.figures["exposed_s"], each.figures["overlapped_share"])
        for each in traced.findings
    ] == [("naive", 0.49, pytest.approx(0.02)), ("bucketed", 0.1, pytest.approx(0.9))]


FIT = {"exposed_communication_s": 0.01, "gradient_bytes": 1e8, "latency_s": 4e-4}
FIT |= {"algorithm_bandwidth_bytes_per_s": 2.5e8}
BALANCED = {"num_buckets": 31.62, "bucket_bytes": 3_162_278, "overhead_s": 0.0253}
EXAMPLE = {"num_buckets": 63.2, "bucket_bytes": 126_491_106}
SLOPELESS = {name: FIT[name] for name in FIT if "bandwidth" not in name}


@pytest.mark.parametrize(
    ("fit", "without", "balanced", "measured"),
    [
        (FIT, {}, BALANCED, {"backward_s": 0.5, "sending_s": 0.4, "num_buckets": 250}),
        (FIT, {"batch": 8}, BALANCED, None),
        (FIT, {"context": 256}, BALANCED, None),
        (FIT, {"hardware": "another"}, BALANCED, None),
        (FIT | {"latency_s": 0.5}, {"batch": 8}, {"says": "send one bucket"}, None),
        (FIT | {"latency_s": 0.0}, {}, EXAMPLE, None),
        (SLOPELESS, {}, EXAMPLE, None),
    ],
)
def test_the_equation_is_filled_with_what_belongs_together(
    fit: dict[str, float], without: Any, balanced: Any, measured: Any
) -> None:
    records = [_prediction(25.0, fit, **LAB), _step("none", exposed=0.0, **{**LAB, **without})]
    expected = {"best_bucket_balanced": balanced, "best_bucket_measured": measured}
    expected |= {"overhead_equation": {"says": "s/(n w) + n o"}}
    blocks = check(answers.calculate_overhead, records, expected)
    assert ("an example" in blocks[0].heading) == (balanced is EXAMPLE)


def test_each_device_has_a_block_with_its_picture() -> None:
    blocks = NAIVE(Evidence.of([_naive(), _naive(**GPU)]))
    assert [each.heading for each in blocks] == ["a processor, one host", "h100-sxm, one host"]
    blocks += FLAT(Evidence.of(_flat(1.0, 0.1))) + OVERLAP(Evidence.of(_buckets(1.1)))
    pictures = [picture for each in blocks for picture in each.pictures]
    names = [f"{name}-strategies" for name in ("naive-0", "naive-1", "flat-0")]
    assert [picture.name for picture in pictures] == [*names, "strategies-0", "bucket-size-0"]
    assert all(b"</svg>" in picture.svg for picture in pictures)
