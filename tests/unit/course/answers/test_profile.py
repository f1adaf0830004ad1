"""What is said of traced steps is true of the run, the machine and the figures it is said of."""

from typing import Any

import msgspec
import pytest

from paceline.course.answers import profile as answers_profile
from paceline.course.answers.profile import answer_profile
from paceline.records import Metric, Record, find_kind
from paceline.reports.document.model import Block, Picture
from paceline.reports.evidence.groups import Evidence
from tests.unit.course.profile_cases import (
    EARLY,
    FORWARD,
    LATE,
    MODEL,
    OPTIMIZER,
    TRAIN,
    Ranges,
    operator_rows,
    profile,
    profile_environment,
)
from tests.unit.course.report_cases import sentences
from tests.unit.reports.factory import step_record

KERNELS: Ranges = {
    "forward": {("matmul", "sgemm_128x64"): (0.6, 31, 0), ("other", "kernel"): (0.4, 9, 0)},
}
FUSED: Ranges = {
    "forward": {("matmul", "aten::mm"): (0.6, 15, 1e9), ("attention", "aten::sdpa"): (0.4, 2, 1e9)},
}


@pytest.fixture(autouse=True)
def _quick_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(_figure: Any, name: str, description: str) -> Picture:
        return Picture(name=name, description=description, svg=b"<svg/>")

    monkeypatch.setattr(answers_profile, "picture_of", nothing)


def _said(records: list[Record]) -> str:
    return "\n".join(sentences(answer_profile(Evidence.of(records))))


def _attention(softmax_s: float, product_s: float) -> Ranges:
    return {
        "forward": FORWARD,
        "attention_scores": {("matmul", "aten::bmm"): (product_s, 2, 1e9)},
        "attention_softmax": {("softmax", "aten::_softmax"): (softmax_s, 2, 0)},
        "attention_values": {("matmul", "aten::bmm"): (product_s, 2, 1e9)},
    }


def _phases(**products: float) -> Ranges:
    """Phases of a second each, with this share of products."""
    return {
        name: {("matmul", "aten::mm"): (share, 1, 0), ("copy", "aten::copy_"): (1 - share, 1, 0)}
        for name, share in products.items()
    }


@pytest.mark.parametrize(
    ("records", "must", "must_not"),
    [
        pytest.param(
            profile(TRAIN, expected={"forward": 2e9, "backward": 4e9}),
            ["6e+09: agrees", "multiplies by a weight 15 times", "make 15, which agrees"],
            ["does not agree"],
            id="a CPU's operations are counted",
        ),
        pytest.param(
            profile(TRAIN, expected={"forward": 4e9}, num_layers=3),
            ["2e+09: does not agree with the model: it is 50% below", "make 22, which does not"],
            [],
            id="counts that are wrong are called so",
        ),
        pytest.param(
            profile(KERNELS, expected={"forward": 2e9}),
            ["sgemm_128x64 takes longest, 600 ms (60%) in 31 calls; products are 60%"],
            ["agree", "operations of products", "multiplies by a weight"],
            id="kernels have no operations to count",
        ),
        pytest.param(
            profile(FUSED, expected={"forward": 2e9}),
            ["products outside of attention are 60% of the time, attention 40%"],
            ["operations of products"],
            id="a fused attention multiplies inside",
        ),
        pytest.param(
            profile({"forward": {("other", "kernel"): (0.5, 1, 0)}}, expected={"forward": 2e9}),
            ["in 1 call; products are 0% of the time, other 100%."],
            ["operations of products"],
            id="no product is recognised",
        ),
        pytest.param(
            profile(_attention(0.1, 0.1)),
            ["0.5 times as long as the two products", "some 5 operations", "they do 256", "25.6"],
            ["accounts for its time", "bound by memory"],
            id="softmax is slow for its operations though shorter than the products",
        ),
        pytest.param(
            profile(_attention(0.006, 0.1)),
            ["so the count of operations accounts for its time"],
            ["does not account", "fusing"],
            id="softmax takes as long as its operations say",
        ),
        pytest.param(
            profile(_attention(0.1, 0.1), head_dim=None),
            ["0.5 times as long as the two products (200 ms)."],
            ["operations per score"],
            id="the width of a head is not known",
        ),
        pytest.param(
            profile(_attention(0.1, 0.0)), [], ["Inside attention"], id="products took no time"
        ),
        pytest.param(
            profile({**_phases(forward=0.8, backward=0.6), "optimizer": OPTIMIZER}),
            [
                "falls from 80% to 47%: in backward it is 60%, and the optimizer, which has none, "
                "takes 33% of the step."
            ],
            ["rises"],
            id="backward takes part in the fall",
        ),
        pytest.param(
            profile(_phases(forward=0.2, backward=0.8)),
            ["rises from 20% to 50%: in backward it is 80%."],
            ["falls", "and the optimizer"],
            id="backward raises the share",
        ),
        pytest.param(
            profile(_phases(forward=0.5, backward=0.5, optimizer=0.5)),
            ["stays at 50%: in backward it is 50%, and the optimizer, where it is 50%, takes 33%"],
            ["rises", "falls"],
            id="equal shares do not rise",
        ),
        pytest.param(profile(KERNELS), [], ["whole"], id="a forward pass is no whole step"),
    ],
)
def test_operators(records: list[Record], must: list[str], must_not: list[str]) -> None:
    said = _said(records)
    assert "takes longest" in said
    for text in must:
        assert text in said, said
    for text in must_not:
        assert text not in said, said


def test_operations_that_are_not_known_have_no_table() -> None:
    def captions(records: list[Record]) -> str:
        (block,) = answer_profile(Evidence.of(records))
        return " ".join(table.caption for table in block.tables)

    assert "FLOPs" in captions(profile(TRAIN, expected={"forward": 2e9}))
    assert "FLOPs" not in captions(profile(KERNELS, expected={"forward": 2e9}))
    assert "FLOPs" not in captions(profile(FUSED, expected={"forward": 2e9}))


def _stopwatch(seconds: float, *, machine: str = "laptop", **case: Any) -> Record:
    record = step_record(**{**MODEL, "hardware": machine, "phase": "forward", **case})
    return msgspec.structs.replace(
        record,
        environment=profile_environment(machine),
        metrics={**record.metrics, "step_time_s": Metric(value=seconds)},
    )


@pytest.mark.parametrize(
    ("stopwatch", "must", "must_not"),
    [
        pytest.param(_stopwatch(0.95), "matches the one on the stopwatch", "tracing", id="alike"),
        pytest.param(_stopwatch(0.5), "(+100%); tracing adds time", "no time", id="slower"),
        pytest.param(_stopwatch(2.0), "(-50%); tracing saves no time", "adds", id="faster"),
        pytest.param(_stopwatch(0.95, device="cuda"), "", "stopwatch", id="another device"),
        pytest.param(_stopwatch(0.95, hardware="h100"), "", "stopwatch", id="another GPU"),
        pytest.param(_stopwatch(0.95, d_model=64), "", "stopwatch", id="another shape"),
        pytest.param(_stopwatch(0.95, compile="whole"), "", "stopwatch", id="compiled"),
        pytest.param(_stopwatch(0.0), "", "stopwatch", id="no time at all"),
        pytest.param(
            _stopwatch(0.95, machine="server", hardware="laptop"), "", "stopwatch", id="elsewhere"
        ),
        pytest.param(
            step_record(outcome="out_of_memory", **{**MODEL, "phase": "forward"}),
            "",
            "stopwatch",
            id="out of memory",
        ),
    ],
)
def test_a_trace_is_laid_beside_the_same_step_only(
    stopwatch: Record, must: str, must_not: str
) -> None:
    said = _said([*profile({"forward": FORWARD}, step_s=1.0), stopwatch])
    assert must in said, said
    assert must_not not in said, said


OLD: Ranges = {
    "forward": {("matmul", "aten::old"): (0.6, 1, 0), ("copy", "aten::mul"): (0.4, 1, 0)}
}
NEW: Ranges = {
    "forward": {("matmul", "aten::new"): (0.9, 1, 0), ("copy", "aten::mul"): (0.1, 1, 0)}
}


def _operator_names(block: Block) -> set[str]:
    return {row[0] for row in block.tables[1].rows}


@pytest.mark.parametrize("order", [1, -1], ids=["in order of time", "the newest first"])
def test_two_runs_on_one_machine_are_not_mixed(order: int) -> None:
    records = [*profile(OLD, time=EARLY), *profile(NEW, time=LATE)][::order]
    (block,) = answer_profile(Evidence.of(records))
    kept = "aten::new" if order == 1 else "aten::old"
    assert _operator_names(block) == {kept, "aten::mul"}
    (block,) = answer_profile(Evidence(records=tuple(records)))
    assert _operator_names(block) == {"aten::new", "aten::mul"}


def test_two_machines_are_not_mixed() -> None:
    records = [*profile(OLD), *profile(NEW, machine="server", time=LATE)]
    blocks = answer_profile(Evidence(records=tuple(records)))
    assert [block.heading.rpartition("; ")[2] for block in blocks] == ["laptop", "server"]
    assert [_operator_names(block) & {"aten::old", "aten::new"} for block in blocks] == [
        {"aten::old"},
        {"aten::new"},
    ]
    assert [len(block.environments) for block in blocks] == [1, 1]
    kept = [_operator_names(block) for block in answer_profile(Evidence.of(records))]
    assert kept[-1] == {"aten::new", "aten::mul"}
    assert all(names in ({"aten::old", "aten::mul"}, kept[-1]) for names in kept)


def test_what_is_no_profile_of_a_step_is_left_out() -> None:
    named = [
        msgspec.structs.replace(record, case={**record.case, "subject": "trace.json"})
        for record in operator_rows(OLD, "", profile_environment())
    ]
    assert answer_profile(Evidence.of(named)) == ()


def test_a_step_can_be_matched_by_a_memory_timeline() -> None:
    assert find_kind("step").join_key == find_kind("memory_timeline").join_key
