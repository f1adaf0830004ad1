"""Tests that the numbers of data-parallel steps follow from the records."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from paceline.course import calculated, parallel
from paceline.records import Record
from paceline.reports.record_sets import RecordSet
from tests.unit.course.report_cases import (
    FEW,
    GPU,
    NOISY,
    ONE,
    STEADY,
    check,
    make_record,
    question_of,
)
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
    sizes = [_step("ddp", size, step, spread=spread) for size, step in enumerate(others, 1)]
    return [_step("ddp", 25, spread=STEADY[: len(spread)]), *sizes]


def _predicted(*exposed: float) -> list[Record]:
    measured = [_step("ddp", size, exposed=0.0172) for size in range(2)]
    predicted = [{"exposed_communication_s": seconds} for seconds in exposed]
    return measured + [_prediction(size, each) for size, each in enumerate(predicted)]


def _prediction(size: float, metrics: dict[str, float], **case: Any) -> Record:
    return _record("prediction", metrics, "ddp", size, predicts="ddp", **case)


BUCKET = _step("ddp", 25)
NONE = _step("none", exposed=0.0)
NOISIER = _step("overlapped", step=1.02, spread=NOISY)
ONCE = _step("torch_ddp", step=2.0, spread=ONE)
RIVALS = [_step("ddp", 1, 1.5), BUCKET, _naive(1.02, 0.3), _step("flat", None, 0.98, 0.4)]
RIVALS += [NOISIER, ONCE, NONE]
NAIVE, FLAT, OVERLAP = parallel.exposed_communication, parallel.flat_step, parallel.best_bucket
LATER = _prediction(5, {"exposed_communication_s": 0.018})
EXPOSED, ERROR = "exposed_communication", "prediction_error"
BEST, STEP = "best_bucket", "flat_step"
LOOPBACK: dict[str, Any] = {
    "bus_bytes_per_s": 2.5e8,
    "link_share": None,
    "says": "(link: loopback;",
}


@pytest.mark.parametrize(
    ("finds", "records", "expected"),
    [
        (NAIVE, [_naive(2.0, 0.4)], {EXPOSED: {"step_time_s": 2, "num_messages": 75}}),
        (NAIVE, [_naive(2.0, 0.4)], {EXPOSED: {"exposed_communication_s": 0.4}}),
        (NAIVE, [_naive(2.0, 0.4)], {EXPOSED: {"exposed_share": 0.2, **LOOPBACK}}),
        # The link needs 400 ms.
        (NAIVE, [_naive(2.0, 0.44, **LAB)], {EXPOSED: {"link_share": 0.909}}),
        (NAIVE, [_naive(2.0, 0.60, **LAB)], {EXPOSED: {"link_share": 0.667}}),
        (FLAT, _flat(0.95, 0.05), {STEP: {"ratio": 0.95, "naive_num_messages": 75}}),
        (FLAT, _flat(1.01, 0.12), {STEP: {"ratio": 1.01, "exposed_ratio": 1.2}}),
        # Without communication, a step trains nothing that the ranks share.
        (OVERLAP, [_step("ddp", 25, 1.2), NONE], {BEST: {"ratio": None}}),
        (OVERLAP, RIVALS, {BEST: {"ratio": 1 / 0.98, "says": "of the others, flat."}}),
        (OVERLAP, [BUCKET, NOISIER], {BEST: {"ratio_low": 0.999 / 1.3 / 1.02}}),
        (OVERLAP, [BUCKET, ONCE], {BEST: {"ratio": 0.5, "says": [FEW, "of the others, torch"]}}),
        (OVERLAP, _buckets(), {BEST: {"num_sizes": 1, "step_time_s": 1, "ratio": None}}),
        (OVERLAP, _buckets(1.1, 1.2), {BEST: {"num_sizes": 3, "says": "ddp 25 MiB has"}}),
        # Of the other sizes, the one with the shortest step.
        (OVERLAP, _buckets(1.1, 1.01), {BEST: {"ratio": 1 / 1.01, "says": "ddp 2 MiB."}}),
        (OVERLAP, [BUCKET], {BEST: {"exposed_communication_s": 0.1, "communication_s": 0.5}}),
        (OVERLAP, [_step("ddp", 25, alone=None)], {BEST: {"communication_s": None}}),
        (OVERLAP, _predicted(0.0066, 0.0172), {ERROR: {"num_close": 1, "predicted_s": 0.0066}}),
        (OVERLAP, _predicted(0.0066, 0.0172), {ERROR: {"num_sizes": 2, "error_share": 0.0106}}),
        (
            *(OVERLAP, _predicted(0.0188, 0.0157)),
            {ERROR: {"num_close": 2, "exposed_communication_s": 0.0172}},
        ),
        (OVERLAP, _predicted(0.0190, 0.0154), {ERROR: {"num_close": 0}}),
        (OVERLAP, [*_predicted(), LATER], {ERROR: None, BEST: {"num_sizes": 2}}),
    ],
)
@pytest.mark.usefixtures("no_pictures")
def test_numbers(finds: Any, records: list[Record], expected: Any) -> None:
    check(finds, records, expected)


@pytest.mark.parametrize("finds", [NAIVE, FLAT, OVERLAP])
def test_one_rank_and_failures_tell_nothing_of_communication(finds: Any) -> None:
    names: Any = (("none",), ("naive",), ("flat",), ("ddp", 25))
    check(finds, [_step(*name, world_size=1) for name in names], {})
    check(finds, [_step(*name, world_size=1, **GPU) for name in names], {})
    check(finds, [_record("ddp", {}, *name, outcome="failed") for name in names], {})


@pytest.mark.usefixtures("no_pictures")
def test_steps_of_different_runs_are_not_compared_round_by_round() -> None:
    # Round by round, each step is 2% shorter; from run to run, the machine varies by more.
    drifting = (0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3)
    later = msgspec.structs.replace(ENVIRONMENT, time="2026-01-03T00:00:00+00:00")
    bucketed = _step("ddp", 25.0, 0.98, spread=drifting, **LAB)
    for environment, high in ((ENVIRONMENT, 0.98), (later, 0.98 * 1.3 / 0.7 * 1.05)):
        naive = _naive(spread=drifting, environment=environment, **LAB)
        expected = {BEST: {"ratio": 0.98, "ratio_high": high}}
        (block,) = check(OVERLAP, [bucketed, naive], expected)
    days = f"; 2026-01-03 to {ENVIRONMENT.time[:10]}"
    assert [line.endswith(days) for line in block.environments] == [True]


@pytest.mark.usefixtures("no_pictures")
def test_traces_tell_the_share_that_overlaps_on_the_rank_that_waits_least() -> None:
    cases = (("ddp", 0, 0.9, 0.1), ("naive", 0, 0.0, 1.0), ("naive", 1, 0.01, 0.49))
    names = ("overlapped_communication_s", "exposed_communication_s")
    records = [
        _record("timeline", dict(zip(names, times, strict=True)), strategy, rank=rank)
        for strategy, rank, *times in cases
    ]
    (traced,) = question_of(parallel.overlap_in_trace).answer(RecordSet.of(records))
    names = ("exposed_communication_s", "total_s", "overlapped_share")
    assert [
        (each.message.split(":")[0], *(each.figures[name] for name in names))
        for each in traced.findings
    ] == [("naive", 0.49, 0.5, pytest.approx(0.02)), ("ddp", 0.1, 1.0, pytest.approx(0.9))]


FIT = {"exposed_communication_s": 0.01, "gradient_bytes": 1e8, "latency_s": 4e-4}
FIT |= {"algorithm_bandwidth_bytes_per_s": 2.5e8}
BALANCED = {"num_buckets": 31.62, "bucket_bytes": 3_162_278, "overhead_s": 0.0253}
EXAMPLE = {"num_buckets": 63.2, "bucket_bytes": 126_491_106}
SLOPELESS = {name: FIT[name] for name in FIT if "bandwidth" not in name}


@pytest.mark.parametrize(
    ("fit", "without", "balanced", "num_buckets"),
    [
        (FIT, {}, BALANCED, 250),
        (FIT, {"batch": 8}, BALANCED, None),
        (FIT, {"context": 256}, BALANCED, None),
        (FIT, {"hardware": "another"}, BALANCED, None),
        (FIT | {"latency_s": 0.5}, {"batch": 8}, {"num_buckets": 0.894}, None),
        (FIT | {"latency_s": 0.0}, {}, EXAMPLE, None),
        (SLOPELESS, {}, EXAMPLE, None),
    ],
)
def test_the_equation_is_filled_with_what_belongs_together(
    fit: dict[str, float], without: Any, balanced: Any, num_buckets: float | None
) -> None:
    records = [_prediction(25.0, fit, **LAB), _step("none", exposed=0.0, **{**LAB, **without})]
    blocks = check(calculated.overhead, records, {"overhead": balanced})
    measured = [each.values["num_buckets"] for each in blocks[0].working[1:]]
    assert measured == ([] if num_buckets is None else [pytest.approx(num_buckets)])
    assert "s/(n w) + n o" in blocks[0].findings[0].text
    assert ("an example" in blocks[0].heading) == (balanced is EXAMPLE)


def test_each_device_has_a_block_with_its_picture() -> None:
    naive, flat, overlap = (question_of(finds).answer for finds in (NAIVE, FLAT, OVERLAP))
    blocks = naive(RecordSet.of([_naive(), _naive(**GPU)]))
    assert [each.heading for each in blocks] == ["a processor, one host", "h100-sxm, one host"]
    blocks += flat(RecordSet.of(_flat(1.0, 0.1))) + overlap(RecordSet.of(_buckets(1.1)))
    pictures = [picture for each in blocks for picture in each.pictures]
    assert [picture.name.split("-cost-")[-1] for picture in pictures[:3]] == [
        *("0-strategies", "1-strategies", "0-strategies")
    ]
    names = [picture.name.rpartition("buckets-")[2] for picture in pictures[3:]]
    assert names == ["0-strategies", "0-bucket-size"]
    assert len({picture.name for picture in pictures}) == len(pictures)
    assert all(b"</svg>" in picture.svg for picture in pictures)
