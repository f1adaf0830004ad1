"""Findings in data-parallel steps: their names, figures and verdicts follow from the records."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from paceline.course.answers import block, strategies
from paceline.course.answers.strategies import (
    answer_flat,
    answer_naive,
    answer_overlap,
    answer_traces,
    calculate_overhead,
)
from paceline.records import Record
from paceline.reports.evidence.groups import Evidence
from tests.unit.course.report_cases import check, make_record, no_drawing
from tests.unit.record_factory import ENVIRONMENT

STEADY = (1.0, 0.999, 1.001, 1.0, 1.0, 1.0, 1.0)
NOISY = (0.8, 1.3, 1.0, 0.7, 1.1, 0.9, 1.2)
ONE = (1.0,)
LAB = {"num_hosts": 2, "link_rate_bits_per_s": 2e9}
UNSHAPED = {"num_hosts": 2, "measured_link_rate_bits_per_s": 2e10}
GPU = {"device": "cuda", "hardware": "h100-sxm", "backend": "nccl"}


@pytest.fixture(autouse=True)
def _quick_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (block, strategies):
        monkeypatch.setattr(module, "draw_picture", no_drawing)


def _step(
    strategy: str,
    bucket_size_mb: float | None = None,
    *,
    step: float = 1.0,
    exposed: float = 0.1,
    spread: Sequence[float] = STEADY,
    alone: float | None = 0.5,
    **case: Any,
) -> Record:
    metrics: dict[str, Any] = {
        "step_time_s": [step * factor for factor in spread],
        "exposed_communication_s": [exposed * factor for factor in spread],
        "forward_time_s": step / 4,
        "backward_time_s": step / 2,
        "optimizer_time_s": step / 8,
        "num_messages": 75,
        "gradient_bytes": 1e8,
        **({} if alone is None else {"communication_s": alone}),
    }
    return _record("ddp", metrics, strategy, bucket_size_mb, **case)


def _record(
    kind: str, metrics: Any, strategy: str, bucket_size_mb: float | None, **case: Any
) -> Record:
    fields: dict[str, Any] = {"model": "small", "batch": 4, "context": 128, "compile": "none"}
    fields |= {"strategy": strategy, "bucket_size_mb": bucket_size_mb}
    return make_record(kind, metrics, **{**fields, **case})


def _prediction(bucket_size_mb: float, metrics: dict[str, float], **case: Any) -> Record:
    return _record("prediction", metrics, "bucketed", bucket_size_mb, predicts="ddp", **case)


@pytest.mark.parametrize(
    ("case", "exposed", "finding", "figures"),
    [
        ({}, 0.4, "loopback", {"bus_bytes_per_s": 2.5e8}),
        ({"link_rate_bits_per_s": 2e9}, 0.4, "loopback", {}),
        ({"num_hosts": 2}, 0.4, "unknown_link", {"bus_bytes_per_s": 2.5e8}),
        (UNSHAPED, 0.4, "unknown_link", {"says": "a single stream reached 20 Gbit/s"}),
        ({**GPU, "hardware": "some GPU"}, 0.4, "unknown_link", {}),
        ({**GPU, "num_hosts": 2}, 0.4, "unknown_link", {}),
        (GPU, 0.4, "link_share", {"link_bytes_per_s": 4.5e11, "says": "NVLink 4"}),
        # The link needs 400 ms.
        (LAB, 0.44, "link_share", {"link_share": 0.909, "says": ("alike (-9%)", "faster link")}),
        (LAB, 0.60, "link_share", {"link_share": 0.667, "says": ("less", "latency of calls")}),
        (LAB, 0.20, "link_share", {"link_share": 2.0, "says": ("more", "other than this link")}),
    ],
)
def test_one_message_per_parameter_is_held_against_the_link(
    case: dict[str, Any], exposed: float, finding: str, figures: dict[str, Any]
) -> None:
    others = {"loopback", "unknown_link", "link_share"} - {finding}
    blocks = answer_naive(Evidence.of([_step("naive", step=2.0, exposed=exposed, **case)]))
    communication = {"step_s": 2.0, "exposed_s": exposed, "exposed_share": exposed / 2}
    check(blocks, {finding: figures, **dict.fromkeys(others)})
    check(blocks, {"exposed_communication": {**communication, "num_messages": 75}})


@pytest.mark.parametrize(
    ("step", "spread", "figures"),
    [
        (1.2, STEADY, {"ratio": 1.2, "none_step_s": 1.0, "slowdown_s": 0.1, "says": "more"}),
        (0.9, STEADY, {"ratio": 0.9, "slowdown_s": -0.2, "says": "less"}),
        (1.02, NOISY, {"ratio": 1.02, "ratio_low": 0.714, "says": "alike"}),
        (1.2, ONE, {"ratio": 1.2, "says": "unknown: too few samples, 1"}),
    ],
)
@pytest.mark.parametrize(
    ("answer", "strategy"), [(answer_naive, ("naive",)), (answer_overlap, ("bucketed", 25.0))]
)
def test_steps_are_held_against_a_step_without_communication(
    answer: Any, strategy: Any, step: float, spread: Sequence[float], figures: dict[str, Any]
) -> None:
    none = _step("none", exposed=0.0, spread=STEADY[: len(spread)])
    record = _step(*strategy, step=step, spread=spread)
    check(answer(Evidence.of([none, record])), {"step_against_none": figures})
    check(answer(Evidence.of([record])), {"step_against_none": None})


@pytest.mark.parametrize(
    ("step", "exposed", "spread", "says"),
    [
        (0.95, 0.05, STEADY, "less"),
        (1.01, 0.12, STEADY, "more"),
        (0.95, 0.09, NOISY, "alike"),
        (0.95, 0.05, ONE, "unknown: too few samples, 1"),
    ],
)
def test_one_message_for_all_is_held_against_one_per_parameter(
    step: float, exposed: float, spread: Sequence[float], says: str
) -> None:
    naive = _step("naive", spread=STEADY[: len(spread)])
    flat = _step("flat", step=step, exposed=exposed, spread=spread)
    expected = {
        "flat_step": {"ratio": step, "naive_step_s": 1.0, "flat_step_s": step, "says": says},
        "flat_exposed_communication": {
            "ratio": exposed / 0.1,
            "naive_exposed_s": 0.1,
            "flat_exposed_s": exposed,
            "says": says,
        },
    }
    check(answer_flat(Evidence.of([flat, naive])), expected)


@pytest.mark.parametrize(
    ("rival", "spread", "says"),
    [(1.02, STEADY, "less"), (0.98, STEADY, "more"), (1.02, NOISY, "alike"), (2.0, ONE, "unknown")],
)
@pytest.mark.parametrize("strategy", ["naive", "flat", "overlapped", "torch_ddp"])
def test_the_best_bucket_is_held_against_every_strategy(
    strategy: str, rival: float, spread: Sequence[float], says: str
) -> None:
    best = _step("bucketed", 25.0, spread=STEADY[: len(spread)])
    records = [
        _step("bucketed", 1.0, step=1.5, spread=STEADY[: len(spread)]),
        best,
        _step(strategy, step=rival, exposed=0.3, spread=spread),
    ]
    figures = {"ratio": 1 / rival, "rival_step_s": rival, "rival_exposed_s": 0.3, "says": says}
    check(answer_overlap(Evidence.of(records)), {f"step_against_{strategy}": figures})


def test_steps_of_different_runs_are_not_compared_round_by_round() -> None:
    # Round by round, each step is 2% shorter; from run to run, a machine changes by more.
    drifting = (0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3)
    later = msgspec.structs.replace(ENVIRONMENT, time="2026-01-03T00:00:00+00:00")
    naive = _step("naive", step=1.0, spread=drifting, **LAB)
    bucketed = _step("bucketed", 25.0, step=0.98, spread=drifting, **LAB)
    for other, says in (
        (naive, "less"),
        (msgspec.structs.replace(naive, environment=later), "alike"),
    ):
        blocks = answer_overlap(Evidence.of([bucketed, other]))
        check(blocks, {"step_against_naive": {"ratio": 0.98, "says": says}})


@pytest.mark.parametrize(
    ("others", "spread", "says"),
    [
        ([], STEADY, "1 measured, 1 s."),
        ([1.1, 1.2], STEADY, "3 measured, 1 s."),
        ([1.1, 1.01], NOISY, "; alike: bucketed 1 MiB, bucketed 2 MiB."),
        ([1.1], ONE, "; unknown: bucketed 1 MiB."),
    ],
)
def test_the_best_bucket_is_named_with_those_it_cannot_be_told_from(
    others: list[float], spread: Sequence[float], says: str
) -> None:
    records = [_step("bucketed", 25.0, spread=STEADY[: len(spread)])]
    records += [
        _step("bucketed", float(size), step=step, spread=spread)
        for size, step in enumerate(others, start=1)
    ]
    figures = {"num_sizes": len(records), "step_s": 1.0, "says": ("bucketed 25 MiB has", says)}
    check(answer_overlap(Evidence.of(records)), {"best_bucket": figures})


@pytest.mark.parametrize(
    ("case", "alone", "figures"),
    [
        ({}, 0.5, {"exposed_s": 0.1, "communication_s": 0.5}),
        (GPU, 0.5, {"exposed_s": 0.1, "communication_s": 0.5}),
        (LAB, None, {"exposed_s": 0.1, "says": "takes unknown"}),
    ],
)
def test_exposed_communication_is_told_and_loopback_named(
    case: dict[str, Any], alone: float | None, figures: dict[str, Any]
) -> None:
    blocks = answer_overlap(Evidence.of([_step("bucketed", 25.0, alone=alone, **case)]))
    loopback = None if case else {"world_size": 2}
    check(blocks, {"exposed_communication": figures, "loopback": loopback})


@pytest.mark.parametrize(
    ("predicted", "figures"),
    [
        (
            {1.0: 0.0066, 10.0: 0.0172},
            {"num_alike": 1, "num_sizes": 2, "predicted_s": 0.0066, "error_share": 0.0106},
        ),
        ({1.0: 0.0188, 10.0: 0.0157}, {"num_alike": 2, "measured_s": 0.0172}),
        ({1.0: 0.0190, 10.0: 0.0154}, {"num_alike": 0, "predicted_s": 0.0190}),
        ({5.0: 0.0180}, None),
    ],
)
def test_predictions_of_the_exposed_time_are_checked(
    predicted: dict[float, float], figures: dict[str, Any] | None
) -> None:
    records = [_step("bucketed", size, exposed=0.0172) for size in (1.0, 10.0)]
    records += [
        _prediction(size, {"exposed_communication_s": seconds})
        for size, seconds in predicted.items()
    ]
    unknown = {"num_sizes": 2} if figures is None else None
    blocks = answer_overlap(Evidence.of(records))
    check(blocks, {"prediction_error": figures, "no_prediction": unknown})


def test_traces_tell_the_share_that_overlaps_on_the_rank_that_waits_least() -> None:
    cases = (("bucketed", 0, 0.9, 0.1), ("naive", 0, 0.0, 1.0), ("naive", 1, 0.01, 0.49))
    records = [
        _record(
            "timeline",
            {"overlapped_communication_s": overlapped, "exposed_communication_s": exposed},
            *(strategy, None),
            rank=rank,
        )
        for strategy, rank, overlapped, exposed in cases
    ]
    (traced,) = answer_traces(Evidence.of(records))
    assert [
        (each.message.split(":")[0], each.figures["exposed_s"], each.figures["overlapped_share"])
        for each in traced.findings
    ] == [("naive", 0.49, pytest.approx(0.02)), ("bucketed", 0.1, pytest.approx(0.9))]


@pytest.mark.parametrize("answer", [answer_naive, answer_flat, answer_overlap])
@pytest.mark.parametrize("case", [{}, GPU])
def test_one_rank_and_failures_tell_nothing_of_communication(
    answer: Any, case: dict[str, Any]
) -> None:
    names = (("none", None), ("naive", None), ("flat", None), ("bucketed", 25.0))
    alone = [_step(*name, exposed=0.0, alone=None, world_size=1, **case) for name in names]
    assert answer(Evidence.of(alone)) == ()
    failed = [_record("ddp", {}, *name, outcome="failed") for name in names]
    assert answer(Evidence.of(failed)) == ()


FIT = {
    "exposed_communication_s": 0.01,
    "gradient_bytes": 1e8,
    "latency_s": 4e-4,
    "algorithm_bandwidth_bytes_per_s": 2.5e8,
}
BALANCED = {"num_buckets": 31.62, "bucket_bytes": 3_162_278, "overhead_s": 0.0253}
EXAMPLE = {"num_buckets": 63.2, "bucket_bytes": 126_491_106}


@pytest.mark.parametrize(
    ("fit", "without", "balanced", "measured"),
    [
        (FIT, {}, BALANCED, {"backward_s": 0.5, "sending_s": 0.4, "num_buckets": 250}),
        (FIT, {"batch": 8}, BALANCED, None),
        (FIT, {"context": 256}, BALANCED, None),
        (FIT, {"hardware": "another"}, BALANCED, None),
        (FIT | {"latency_s": 0.5}, {"batch": 8}, {"says": "send one bucket"}, None),
        (FIT | {"latency_s": 0.0}, {}, EXAMPLE, None),
        ({name: FIT[name] for name in FIT if "bandwidth" not in name}, {}, EXAMPLE, None),
    ],
)
def test_the_equation_is_filled_with_what_belongs_together(
    fit: dict[str, float],
    without: dict[str, Any],
    balanced: dict[str, Any],
    measured: dict[str, Any] | None,
) -> None:
    records = [_prediction(25.0, fit, **LAB), _step("none", exposed=0.0, **{**LAB, **without})]
    blocks = calculate_overhead(Evidence.of(records))
    assert ("an example" in blocks[0].heading) == (balanced is EXAMPLE)
    check(blocks, {"best_bucket_balanced": balanced, "best_bucket_measured": measured})
    check(blocks, {"overhead_equation": {"says": "s/(n w) + n o"}})


def test_records_of_a_gpu_have_a_block_of_their_own() -> None:
    blocks = answer_naive(Evidence.of([_step("naive"), _step("naive", **GPU)]))
    assert [each.heading for each in blocks] == ["a processor, one host", "h100-sxm, one host"]


def test_pictures_of_steps_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    pair = Evidence.of([_step("naive"), _step("flat")])
    for answer, name in ((answer_naive, "naive-0-strategies"), (answer_flat, "flat-0-strategies")):
        (answered,) = answer(pair)
        assert [picture.name for picture in answered.pictures] == [name]
        assert b"</svg>" in answered.pictures[0].svg
