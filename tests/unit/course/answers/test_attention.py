"""What is said of attention is true of the figures, whatever was measured beside what."""

from collections.abc import Sequence
from typing import Any

import pytest

from paceline.course.answers import attention as answers_attention
from paceline.course.answers.attention import (
    answer_compiled_attention,
    answer_flash,
    answer_kernels,
    answer_naive,
)
from paceline.records import Metric, Record, find_kind
from paceline.reports.evidence.groups import Evidence
from tests.unit.course.report_cases import no_drawing, sentences
from tests.unit.reports.factory import ENVIRONMENT

STEADY = (1.0, 0.999, 1.001, 1.0, 1.0, 1.0, 1.0)


@pytest.fixture(autouse=True)
def _quick_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers_attention, "draw_picture", no_drawing)


def _case(**case: Any) -> dict[str, Any]:
    usual: dict[str, Any] = dict.fromkeys(find_kind("attention").join_key, "x")
    usual |= {"implementation": "naive", "batch": 1, "context": 1024, "head_dim": 64}
    usual |= {"dtype": "float32", "float32_matmul_precision": "highest", "compile": "none"}
    return usual | {"causal": True, "device": "cpu", "hardware": "a processor"} | case


def _attention(
    seconds: float = 1.0,
    *,
    spread: Sequence[float] = STEADY,
    saved: float = 1e6,
    peak: float = 3e6,
    rate: float | None = None,
    with_both: bool = True,
    **case: Any,
) -> Record:
    metrics = {
        name: Metric.from_samples([seconds * share * factor for factor in spread])
        for name, share in (("forward", 0.25), ("backward", 0.75), ("both", 1.0))
        if with_both or name != "both"
    }
    metrics = {f"{name}_time_s": metric for name, metric in metrics.items()}
    metrics |= {"saved_for_backward_bytes": Metric(value=saved), "peak_bytes": Metric(value=peak)}
    if rate is not None:
        metrics["flops_per_s"] = Metric(value=rate)
    return Record(
        kind="attention",
        case=_case(**case),
        environment=ENVIRONMENT,
        metrics=metrics,
        outcome="ok",
    )


def _skipped(**case: Any) -> Record:
    return Record(
        kind="attention",
        case=_case(**case),
        environment=ENVIRONMENT,
        metrics={},
        outcome="out_of_memory",
        reason="too large",
    )


def _check(answer: Any, records: Sequence[Record], must: list[str], must_not: list[str]) -> None:
    text = " ".join(sentences(answer(Evidence.of(records))))
    for part in must:
        assert part in text
    for part in must_not:
        assert part not in text


def test_implementations_that_never_met_are_not_compared() -> None:
    records = [_attention(context=1024), _attention(implementation="sdpa", context=4096)]
    _check(answer_flash, records, ["they cannot be compared"], ["shortest", "peaks"])


@pytest.mark.parametrize(
    ("sdpa", "spread", "with_both", "must", "must_not"),
    [
        (0.5, STEADY, True, ["sdpa has the shortest", "naive takes 2 times as long"], ["apart"]),
        (0.5, STEADY, False, ["sdpa has the shortest", "naive takes 2 times as long"], ["apart"]),
        (0.98, STEADY, True, ["naive cannot be told apart from it"], []),
        (0.5, (1.0,), True, ["part of this is judged by one sample only"], ["told apart"]),
    ],
)
def test_the_fastest_is_named_with_those_it_cannot_be_told_from(
    sdpa: float, spread: Sequence[float], with_both: bool, must: list[str], must_not: list[str]
) -> None:
    records = [
        _attention(spread=spread, with_both=with_both),
        _attention(sdpa, spread=spread, with_both=with_both, implementation="sdpa"),
    ]
    _check(answer_flash, records, must, must_not)


@pytest.mark.parametrize(
    ("short", "must", "must_not"),
    [
        (None, ["naive peaks at", "10 times the"], ["the gap"]),
        (2.0, ["at length 256 it is 2 times: the gap grows with the length"], ["shrinks"]),
        (10.0, ["it is 10 times: the gap stays"], ["grows"]),
        (20.0, ["it is 20 times: the gap shrinks"], ["grows"]),
    ],
)
def test_a_gap_in_memory_grows_only_where_it_does(
    short: float | None, must: list[str], must_not: list[str]
) -> None:
    records = [_attention(peak=1e7), _attention(peak=1e6, implementation="sdpa")]
    if short is not None:
        records += [
            _attention(peak=short * 1e5, context=256),
            _attention(peak=1e5, context=256, implementation="sdpa"),
        ]
    _check(answer_flash, records, must, must_not)


def test_equal_and_unknown_peaks_make_no_gap() -> None:
    equal = [_attention(peak=1e6), _attention(peak=1.01e6, implementation="sdpa")]
    _check(answer_flash, equal, ["All peak alike"], ["the gap", "peaks at"])
    none = [_attention(peak=1e6), _attention(peak=0.0, implementation="sdpa")]
    _check(answer_flash, none, ["shortest"], ["peak"])


@pytest.mark.parametrize(
    ("half", "spread", "must", "must_not"),
    [
        (0.2, STEADY, ["2.5 times as fast as in float32", "bits are faster"], ["told apart"]),
        (1.0, STEADY, ["0.5 times as fast", "bits are slower here"], ["faster here"]),
        (0.49, STEADY, ["cannot be told apart, so either the format"], ["bits are"]),
        (
            0.2,
            (1.0,),
            ["2.5 times as fast", "judged by one sample only"],
            ["bits are", "told apart"],
        ),
    ],
)
def test_a_format_matters_only_beyond_the_spread(
    half: float, spread: Sequence[float], must: list[str], must_not: list[str]
) -> None:
    records = [
        _attention(),
        _attention(0.5, spread=spread, implementation="sdpa"),
        _attention(half, spread=spread, implementation="sdpa", dtype="bfloat16"),
    ]
    # The fastest is looked for where most were measured, which is in float32.
    _check(answer_flash, records, must, must_not)


@pytest.mark.parametrize(
    ("case", "rate", "must", "must_not"),
    [
        ({}, 1e12, ["no document states this device's peak in float32"], ["%"]),
        ({}, None, ["shortest"], ["reaches"]),
        ({"hardware": "h100-sxm"}, 33.5e12, ["50% of the device's peak in float32"], ["tfloat32"]),
        (
            {"hardware": "h100-sxm", "float32_matmul_precision": "high"},
            247e12,
            ["50% of the device's peak in tfloat32"],
            ["more than"],
        ),
        ({"hardware": "h100-sxm"}, 247e12, ["more than the device's peak in float32"], ["%"]),
        (
            {"hardware": "v100-sxm2-16gb", "float32_matmul_precision": "high"},
            1e12,
            ["no document states this device's peak in tfloat32"],
            ["%"],
        ),
    ],
)
def test_a_rate_is_a_share_of_the_peak_of_its_own_format(
    case: dict[str, Any], rate: float | None, must: list[str], must_not: list[str]
) -> None:
    records = [
        _attention(**case),
        _attention(0.5, rate=rate, implementation="sdpa", **case),
    ]
    _check(answer_flash, records, must, must_not)


def test_what_has_no_numbers_is_counted_by_implementation() -> None:
    records = [
        *(_attention(context=context) for context in (256, 4096)),
        _skipped(context=1024),
        *(_attention(implementation="sdpa", context=context) for context in (256, 1024, 4096)),
    ]
    said = ["naive has no numbers in 1 of 3 cases, the shortest at length 1024: out of memory"]
    _check(answer_flash, records, said, ["on:", "sdpa has no numbers"])


@pytest.mark.parametrize(
    ("compiled", "spread", "must", "must_not"),
    [
        (0.5, STEADY, ["0.5 times the time of both passes: fusing"], ["slower", "told apart"]),
        (1.5, STEADY, ["1.5 times", "compiling makes it slower here"], ["fusing", "gain"]),
        (1.02, STEADY, ["the two cannot be told apart"], ["fusing", "slower"]),
        (0.5, (1.0,), ["judged by one sample only"], ["fusing", "slower", "told apart"]),
    ],
)
def test_compiling_gains_nothing_where_it_is_slower(
    compiled: float, spread: Sequence[float], must: list[str], must_not: list[str]
) -> None:
    records = [
        _attention(spread=spread),
        _attention(compiled, spread=spread, compile="whole"),
    ]
    _check(answer_compiled_attention, records, must, must_not)


@pytest.mark.parametrize(
    ("saved", "peaks", "must", "must_not"),
    [
        (0.9e6, (1e6, 4e6), ["is still kept", "power 2.00 of the length"], ["computed again"]),
        (0.1e6, (1e6, 2e6), ["computed again", "power 1.00 of the length"], ["is still kept"]),
        (0.1e6, (0.0, 2e6), ["computed again"], ["power"]),
    ],
)
def test_what_compiled_attention_keeps_is_measured(
    saved: float, peaks: tuple[float, float], must: list[str], must_not: list[str]
) -> None:
    records = [
        record
        for context, peak in zip((1024, 2048), peaks, strict=True)
        for record in (
            _attention(context=context),
            _attention(context=context, saved=saved, peak=peak, compile="whole"),
        )
    ]
    _check(answer_compiled_attention, records, must, [*must_not, "length still hurts"])


def test_compiling_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    records = [
        _attention(context=context, compile=compile_)
        for context in (1024, 2048)
        for compile_ in ("none", "whole")
    ]
    (block,) = answer_compiled_attention(Evidence.of(records))
    assert [picture.name for picture in block.pictures] == ["attention-compiled-0"]
    assert b"</svg>" in block.pictures[0].svg


@pytest.mark.parametrize(
    ("saved", "must", "must_not"),
    [
        ((1e6, 4e6), ["power 2.00 of the length, nearest to its square"], ["itself"]),
        ((1e6, 2e6), ["power 1.00 of the length, nearest to the length itself"], ["its square,"]),
        ((0.0, 2e6), ["Every length that was tried fitted."], ["nearest"]),
    ],
)
def test_growth_is_named_by_its_power(
    saved: tuple[float, float], must: list[str], must_not: list[str]
) -> None:
    records = [
        _attention(context=context, saved=kept, causal=False)
        for context, kept in zip((1024, 2048), saved, strict=True)
    ]
    _check(answer_naive, records, must, must_not)


def _kernel(*, matrix: float = 8, spill: float = 0, **case: Any) -> Record:
    usual: dict[str, Any] = dict.fromkeys(find_kind("kernel").join_key, "x")
    names = ("registers", "shared_bytes", "occupancy", "worst_intensity", "best_intensity")
    metrics = {name: Metric(value=1) for name in names}
    metrics |= {"matrix_instructions": Metric(value=matrix), "spill_bytes": Metric(value=spill)}
    metrics["worst_ceiling"] = Metric(value=0.5)
    return Record(
        kind="kernel",
        case=usual | {"kernel": "forward", "architecture": "sm90", **case},
        environment=ENVIRONMENT,
        metrics=metrics,
        outcome="ok",
    )


@pytest.mark.parametrize(
    ("kernel", "must", "must_not"),
    [
        (_kernel(), ["0 of 1 kernels spill", "of those that multiply, 50%"], ["None of them"]),
        (_kernel(spill=4, matrix=0), ["1 of 1", "None of them has"], ["those that multiply"]),
    ],
)
def test_kernels_that_do_not_multiply_have_no_ceiling(
    kernel: Record, must: list[str], must_not: list[str]
) -> None:
    _check(answer_kernels, [kernel], must, must_not)


@pytest.mark.parametrize(
    ("records", "caption"),
    [([_kernel()], "architecture sm90"), ([_kernel(), _kernel(mask="y")], "mask x and y")],
)
def test_the_table_of_kernels_has_a_caption(records: list[Record], caption: str) -> None:
    (block,) = answer_kernels(Evidence.of(records))
    assert caption in block.tables[0].caption
    assert not block.tables[0].caption.startswith(",")
