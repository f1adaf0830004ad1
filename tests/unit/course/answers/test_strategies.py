"""What is said of data-parallel steps is true of the figures, whatever they are."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from paceline.course.answers import strategies as answers_data_parallel
from paceline.course.answers.strategies import (
    answer_flat,
    answer_naive,
    answer_overlap,
    answer_traces,
    calculate_overhead,
    explain_equality,
)
from paceline.records import Metric, Record, find_kind
from paceline.reports.evidence.groups import Evidence
from tests.unit.course.report_cases import no_drawing, sentences
from tests.unit.reports.factory import ENVIRONMENT

STEADY = (1.0, 0.999, 1.001, 1.0, 1.0, 1.0, 1.0)
NOISY = (0.8, 1.3, 1.0, 0.7, 1.1, 0.9, 1.2)
LAB = {"num_hosts": 2, "link_rate_bits_per_s": 2e9}
UNSHAPED = {"num_hosts": 2, "measured_link_rate_bits_per_s": 2e10}
GPU = {"device": "cuda", "hardware": "h100-sxm", "backend": "nccl"}


@pytest.fixture(autouse=True)
def _quick_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers_data_parallel, "draw_picture", no_drawing)


def _metric(seconds: float, spread: Sequence[float]) -> Metric:
    return Metric.from_samples([seconds * factor for factor in spread])


def _case(kind: str, strategy: str, size: float | str | None, **case: Any) -> dict[str, Any]:
    usual: dict[str, Any] = dict.fromkeys(find_kind(kind).join_key, "x")
    usual |= {"strategy": strategy, "bucket_size_mb": size, "model": "small", "compile": "none"}
    usual |= {"batch": 4, "context": 128, "world_size": 2, "num_hosts": 1, "threads": 1}
    return usual | {"device": "cpu", "hardware": "a processor"} | case


def _step(
    strategy: str,
    size: float | str | None = None,
    *,
    step: float = 1.0,
    exposed: float = 0.1,
    spread: Sequence[float] = STEADY,
    exposed_spread: Sequence[float] = STEADY,
    alone: float | None = 0.5,
    gradient_bytes: float = 1e8,
    **case: Any,
) -> Record:
    metrics = {
        "step_time_s": _metric(step, spread),
        "exposed_communication_s": _metric(exposed, exposed_spread[: len(spread)]),
        "forward_time_s": Metric(value=step / 4),
        "backward_time_s": Metric(value=step / 2),
        "optimizer_time_s": Metric(value=step / 8),
        "num_messages": Metric(value=75),
        "gradient_bytes": Metric(value=gradient_bytes),
    }
    if alone is not None:
        metrics["communication_s"] = Metric(value=alone)
    fields = _case("ddp", strategy, size, **case)
    return Record(kind="ddp", case=fields, environment=ENVIRONMENT, metrics=metrics, outcome="ok")


def _failed(strategy: str) -> Record:
    return Record(
        kind="ddp",
        case=_case("ddp", strategy, None),
        environment=ENVIRONMENT,
        metrics={},
        outcome="failed",
        reason="a reason",
    )


def _prediction(size: float, metrics: dict[str, float], **case: Any) -> Record:
    return Record(
        kind="prediction",
        case={"predicts": "ddp", **_case("ddp", "bucketed", size, **case)},
        environment=ENVIRONMENT,
        metrics={name: Metric(value=value) for name, value in metrics.items()},
        outcome="ok",
    )


def _said(answer: Any, records: Sequence[Record]) -> str:
    return " ".join(sentences(answer(Evidence.of(records))))


def _check(text: str, must: Sequence[str], must_not: Sequence[str]) -> None:
    for part in must:
        assert part in text
    for part in must_not:
        assert part not in text


def test_equality_is_compared_once_after_ten_steps() -> None:
    text = " ".join(sentences(explain_equality(Evidence.of([]))))
    _check(text, ["for ten steps", "then compares"], ["every step"])


ONE_HOST = ["share its processors", "says nothing of a network"]
UNKNOWN = ["line's rate is not known"]


@pytest.mark.parametrize(
    ("case", "exposed", "must", "must_not"),
    [
        ({}, 0.4, ONE_HOST, UNKNOWN),
        ({"link_rate_bits_per_s": 2e9}, 0.4, ONE_HOST, ["needs"]),
        ({"num_hosts": 2}, 0.4, [*UNKNOWN, "hold the measured"], ONE_HOST),
        (UNSHAPED, 0.4, [*UNKNOWN, "a single stream reached 20 Gbit/s"], ONE_HOST),
        ({**GPU, "hardware": "some GPU"}, 0.4, UNKNOWN, ONE_HOST),
        ({**GPU, "num_hosts": 2}, 0.4, UNKNOWN, ONE_HOST),
        (GPU, 0.4, ["NVLink 4, the fastest link of h100-sxm"], [*ONE_HOST, *UNKNOWN]),
        # The line needs 400 ms.
        (LAB, 0.44, ["links shaped to 2 Gbit/s", "agrees", "could save 40 ms"], ["does not agree"]),
        (LAB, 0.39, ["agrees", "only fewer bytes or a faster line"], ["does not agree", "save"]),
        (LAB, 0.60, ["50% above", "Nothing here tells"], ["calls counts", "fewer messages help"]),
        (LAB, 0.20, ["50% below", "something other than this line"], ["calls", "fewer messages"]),
    ],
)
def test_one_message_per_parameter_is_held_against_the_line(
    case: dict[str, Any], exposed: float, must: list[str], must_not: list[str]
) -> None:
    _check(_said(answer_naive, [_step("naive", exposed=exposed, **case)]), must, must_not)


@pytest.mark.parametrize(
    ("flat", "spread", "must", "must_not"),
    [
        (0.5, STEADY, ["the time of calls counts, and fewer messages help"], ["do not help"]),
        (0.7, STEADY, ["fewer messages do not help"], ["calls counts", "told apart"]),
        (0.59, NOISY, ["cannot be told apart: fewer messages do not help"], ["calls counts"]),
        (
            0.5,
            (1.0,),
            ["0.833 times as long, judged by one round only"],
            ["calls counts", "not help"],
        ),
    ],
)
@pytest.mark.parametrize("case", [LAB, UNSHAPED])
def test_only_one_message_for_all_tells_what_calls_cost(
    case: dict[str, Any],
    flat: float,
    spread: Sequence[float],
    must: list[str],
    must_not: list[str],
) -> None:
    pair = [
        _step("naive", exposed=0.6, spread=spread, exposed_spread=STEADY, **case),
        _step("flat", exposed=flat, spread=spread, exposed_spread=spread, **case),
    ]
    _check(_said(answer_naive, pair), must, [*must_not, "Nothing here tells"])


@pytest.mark.parametrize(
    ("naive", "spread", "must", "must_not"),
    [
        (1.2, STEADY, ["data parallelism makes it 1.2 times"], ["told apart"]),
        (0.9, STEADY, ["something other than communication"], ["data parallelism makes"]),
        (1.02, NOISY, ["cannot be told apart"], ["data parallelism makes"]),
        (1.2, (1.0,), ["1.2 times as long, judged by one round only"], ["told apart"]),
    ],
)
def test_data_parallelism_is_held_against_no_synchronisation(
    naive: float, spread: Sequence[float], must: list[str], must_not: list[str]
) -> None:
    without = _step("none", exposed=0.0, spread=STEADY[: len(spread)])
    records = [without, _step("naive", step=naive, spread=spread)]
    _check(_said(answer_naive, records), must, must_not)


def test_what_dominates_is_the_larger_part() -> None:
    assert "Communication dominates" in _said(answer_naive, [_step("naive", exposed=0.6)])
    assert "Computing dominates" in _said(answer_naive, [_step("naive", exposed=0.4)])


@pytest.mark.parametrize(
    ("flat", "spread", "must", "must_not"),
    [
        (0.95, STEADY, ["calls that it saves cost more than joining"], ["told apart"]),
        (1.01, STEADY, ["joining the gradients, a copy of all of them"], ["told apart"]),
        (0.95, NOISY, ["the two cannot be told apart"], ["cost", "bytes dominate"]),
        (0.95, (1.0,), ["0.95 times as long, judged by one round only"], ["cost", "told apart"]),
    ],
)
def test_one_message_for_all_is_judged_by_the_rounds(
    flat: float, spread: Sequence[float], must: list[str], must_not: list[str]
) -> None:
    naive = _step("naive", spread=STEADY[: len(spread)])
    records = [naive, _step("flat", step=flat, spread=spread)]
    _check(_said(answer_flat, records), must, must_not)


@pytest.mark.parametrize(
    ("rival", "spread", "must", "must_not"),
    [
        (1.02, STEADY, ["It is faster than one message after backward"], ["told apart"]),
        (0.98, STEADY, ["It is slower than one message after backward"], ["told apart"]),
        (1.02, NOISY, ["It cannot be told apart from one message after"], ["faster", "slower"]),
        (2.0, (1.0,), ["0.5 times as long as one message", "judged by one round only"], ["faster"]),
    ],
)
def test_strategies_are_told_apart_only_by_their_rounds(
    rival: float, spread: Sequence[float], must: list[str], must_not: list[str]
) -> None:
    best = _step("bucketed", 25.0, spread=STEADY[: len(spread)])
    records = [best, _step("flat", step=rival, spread=spread)]
    _check(_said(answer_overlap, records), must, must_not)


@pytest.mark.parametrize(
    ("others", "spread", "must", "must_not"),
    [
        ([], STEADY, ["A step of bucketed 25 MiB takes 1 s."], ["shortest", "told apart"]),
        ([1.1, 1.2], STEADY, ["shortest step of the 3 bucket sizes, 1 s."], ["told apart"]),
        ([1.1, 1.01], NOISY, ["the others cannot be told apart from it"], []),
        ([1.1], (1.0,), ["shortest step of the 2 bucket sizes, 1 s, judged by one round only"], []),
    ],
)
def test_the_best_bucket_is_named_with_those_it_cannot_be_told_from(
    others: list[float], spread: Sequence[float], must: list[str], must_not: list[str]
) -> None:
    records = [_step("bucketed", 25.0, spread=STEADY[: len(spread)])]
    records += [
        _step("bucketed", float(size), step=step, spread=spread)
        for size, step in enumerate(others, start=1)
    ]
    _check(_said(answer_overlap, records), must, must_not)


@pytest.mark.parametrize(
    ("without", "must", "must_not"),
    [
        (None, ["is not known without a step that sends nothing"], ["longer than a step"]),
        (
            _step("none", step=0.7, exposed=0.0),
            ["300 ms longer than a step that sends nothing (700 ms)", "takes 200 ms longer while"],
            ["is not known without", "told apart", "hidden"],
        ),
        (_step("none", step=0.95, exposed=0.0), ["50 ms longer"], ["besides that wait"]),
        (_step("none", step=1.05, exposed=0.0), ["no longer than a step that"], ["besides"]),
        (
            _step("none", step=0.98, exposed=0.0, spread=NOISY),
            ["20 ms longer", "the steps cannot be told apart"],
            ["besides"],
        ),
        (_step("none", step=0.7, exposed=0.0, spread=(1.0,)), ["judged by one round only"], []),
    ],
)
def test_what_communication_costs_is_more_than_the_wait(
    without: Record | None, must: list[str], must_not: list[str]
) -> None:
    spread = STEADY[: len(without.metrics["step_time_s"].samples)] if without else STEADY
    records = [_step("bucketed", 25.0, spread=spread), *([without] if without else [])]
    text = _said(answer_overlap, records)
    _check(text, ["Sent alone its messages take 500 ms; when backward is over", *must], must_not)


def test_a_strategy_that_was_not_sent_alone_has_a_wait_all_the_same() -> None:
    text = _said(answer_overlap, [_step("bucketed", 25.0, alone=None)])
    _check(text, ["When backward is over a step still waits 100 ms."], ["Sent alone"])


@pytest.mark.parametrize(
    ("case", "said"), [({}, True), ({"num_hosts": 2}, False), (GPU, False), (LAB, False)]
)
def test_only_processors_of_one_host_have_nothing_to_hide_behind(
    case: dict[str, Any], said: bool
) -> None:
    text = _said(answer_overlap, [_step("bucketed", 25.0, **case)])
    assert ("claims of overlap need links" in text) == said


@pytest.mark.parametrize(
    ("predicted", "must", "must_not"),
    [
        (
            {1.0: 0.0066, 10.0: 0.0172},
            ["At 1 of 2 bucket sizes", "within 20%", "10.6 ms apart, 1.1% of the step"],
            ["At 2 of 2"],
        ),
        ({1.0: 0.0180, 10.0: 0.0172}, ["At 2 of 2 bucket sizes"], ["At 1 of 2"]),
        ({5.0: 0.0180}, ["What the recurrence expects of these sizes is not known"], ["agrees"]),
    ],
)
def test_predictions_agree_only_within_a_share_of_the_wait(
    predicted: dict[float, float], must: list[str], must_not: list[str]
) -> None:
    measured = [_step("bucketed", size, exposed=0.0172) for size in (1.0, 10.0)]
    predictions = [
        _prediction(size, {"exposed_communication_s": seconds})
        for size, seconds in predicted.items()
    ]
    _check(_said(answer_overlap, [*measured, *predictions]), must, must_not)


@pytest.mark.parametrize(
    ("hidden", "exposed", "must"),
    [
        (0.9, 0.1, "90% of communication under computing: most of it overlaps."),
        (0.45, 0.55, "45% of communication under computing: some of it overlaps."),
        (0.01, 0.99, "1% of communication under computing: no overlap to speak of."),
        (0.0, 0.0, "naive: no message was under way."),
    ],
)
def test_a_trace_has_words_for_much_some_and_no_overlap(
    hidden: float, exposed: float, must: str
) -> None:
    record = Record(
        kind="timeline",
        case={**_case("timeline", "naive", None), "rank": 0},
        environment=ENVIRONMENT,
        metrics={
            "overlapped_communication_s": Metric(value=hidden),
            "exposed_communication_s": Metric(value=exposed),
        },
        outcome="ok",
    )
    assert sentences(answer_traces(Evidence.of([record]))) == [
        must
        if must.startswith("naive")
        else f"naive: {exposed * 1e3:.0f} ms exposed on the rank that waits least, {must}"
    ]


@pytest.mark.parametrize("answer", [answer_naive, answer_flat, answer_overlap])
@pytest.mark.parametrize("case", [{}, GPU])
def test_one_rank_and_failures_tell_nothing_of_communication(
    answer: Any, case: dict[str, Any]
) -> None:
    strategies = (("none", None), ("naive", None), ("flat", None), ("bucketed", 25.0))
    alone = [
        _step(name, size, exposed=0.0, alone=None, world_size=1, **case)
        for name, size in strategies
    ]
    assert answer(Evidence.of(alone)) == ()
    assert answer(Evidence.of([_failed(name) for name, _size in strategies])) == ()


FIT = {
    "exposed_communication_s": 0.01,
    "gradient_bytes": 1e8,
    "latency_s": 4e-4,
    "algorithm_bandwidth_bytes_per_s": 2.5e8,
}


@pytest.mark.parametrize(
    ("fit", "without", "must", "must_not"),
    [
        (
            FIT,
            {},
            [
                "as the equation assumes, some 32 buckets of 3.02 MiB",
                "500 ms at batch 4 and context 128",
            ],
            [],
        ),
        (FIT, {"batch": 8}, ["some 32 buckets"], ["at batch"]),
        (FIT, {"context": 256}, ["some 32 buckets"], ["at batch"]),
        (FIT, {"hardware": "another"}, ["some 32 buckets"], ["at batch"]),
        (FIT | {"latency_s": 0.5}, {"batch": 8}, ["one message for all is best"], ["some "]),
        (FIT | {"latency_s": 0.0}, {}, ["some 63 buckets"], ["at batch"]),
        ({**FIT, "algorithm_bandwidth_bytes_per_s": None}, {}, ["some 63 buckets"], ["at batch"]),
    ],
)
def test_the_equation_is_filled_with_what_belongs_together(
    fit: dict[str, float | None], without: dict[str, Any], must: list[str], must_not: list[str]
) -> None:
    metrics = {name: value for name, value in fit.items() if value is not None}
    records = [_prediction(25.0, metrics, **LAB), _step("none", exposed=0.0, **{**LAB, **without})]
    blocks = calculate_overhead(Evidence.of(records))
    assert ("an example" in blocks[0].heading) == ("63" in must[0])
    _check(
        " ".join(sentences(blocks)), ["as the equation assumes"] if "some" in must[0] else [], []
    )
    _check(" ".join(sentences(blocks)), must, must_not)


def test_pictures_of_steps_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    pair = Evidence.of([_step("naive"), _step("flat")])
    for answer, name in ((answer_naive, "naive-0"), (answer_flat, "flat-0")):
        (block,) = answer(pair)
        assert [picture.name for picture in block.pictures] == [name]
        assert b"</svg>" in block.pictures[0].svg


def test_steps_of_different_runs_are_not_compared_round_by_round() -> None:
    # Round by round, each step is 2% shorter; from run to run, a machine changes by more.
    drifting = (0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3)
    later = msgspec.structs.replace(ENVIRONMENT, time="2026-01-03T00:00:00+00:00")
    naive = _step("naive", step=1.0, spread=drifting, **LAB)
    bucketed = _step("bucketed", 25.0, step=0.98, spread=drifting, **LAB)
    for other, words in (
        (naive, "is faster than one message per parameter after backward"),
        (
            msgspec.structs.replace(naive, environment=later),
            "cannot be told apart from one message per parameter after backward",
        ),
    ):
        said = sentences(answer_overlap(Evidence.of([bucketed, other])))
        assert any(words in sentence for sentence in said), said
