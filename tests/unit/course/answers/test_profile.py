"""Traced steps in, findings out: of one run on one machine, and of its memory."""

from typing import Any

import msgspec
import pytest

from paceline.course.answers import profile as answers
from paceline.records import Metric, Record, find_kind
from paceline.reports.document.model import Block, Picture
from paceline.reports.evidence.groups import Evidence
from tests.unit.course.profile_cases import (
    EARLY,
    FORWARD,
    LATE,
    MODEL,
    TRAIN,
    Ranges,
    operator_rows,
    profile,
    profile_environment,
)
from tests.unit.course.report_cases import check
from tests.unit.record_factory import step_record

KERNELS: Ranges = {
    "forward": {("matmul", "sgemm_128x64"): (0.6, 31, 0), ("other", "kernel"): (0.4, 9, 0)},
}
FUSED: Ranges = {
    "forward": {("matmul", "aten::mm"): (0.6, 15, 1e9), ("attention", "aten::sdpa"): (0.4, 2, 1e9)},
}
IN = "longest_operator_in_"
FLOPS, COUNT, SOFTMAX = "matmul_flops", "weight_matmul_count", "softmax_to_matmuls"


@pytest.fixture(autouse=True)
def _quick_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(_figure: Any, name: str, description: str) -> Picture:
        return Picture(name=name, description=description, svg=b"<svg/>")

    monkeypatch.setattr(answers, "picture_of", nothing)


def _attention(softmax_s: float, matmul_s: float) -> Ranges:
    return {
        "forward": FORWARD,
        "attention_scores": {("matmul", "aten::bmm"): (matmul_s, 2, 1e9)},
        "attention_softmax": {("softmax", "aten::_softmax"): (softmax_s, 2, 0)},
        "attention_values": {("matmul", "aten::bmm"): (matmul_s, 2, 1e9)},
    }


COUNTED = profile(TRAIN, expected={"forward": 2e9, "backward": 4e9})
WRONG = profile(TRAIN, expected={"forward": 4e9}, num_layers=3)
# The kernels of a GPU have no FLOPs to count, and a fused attention multiplies inside.
GPU = profile(KERNELS, expected={"forward": 2e9})
UNKNOWN = profile({"forward": {("other", "kernel"): (0.5, 1, 0)}}, expected={"forward": 2e9})
SLOW, FAST = profile(_attention(0.1, 0.1)), profile(_attention(0.1 / 25.6, 0.1))


@pytest.mark.parametrize(
    ("records", "name", "expected"),
    [
        (COUNTED, FLOPS, {"traced_flops": 6e9, "expected_flops": 6e9, "says": "alike"}),
        (COUNTED, COUNT, {"num_matmuls": 15, "expected_num_matmuls": 15}),
        (COUNTED, f"{IN}forward", {"own_time_s": 0.6, "share": 0.6, "num_calls": 15}),
        (COUNTED, f"{IN}backward", {"own_time_s": 1.2, "total_s": 2.0, "matmul_share": 0.6}),
        (COUNTED, f"{IN}optimizer", {"matmul_share": 0, "says": "elementwise 100%"}),
        (COUNTED, f"{IN}whole_step", {"total_s": 4.0, "matmul_share": 0.45}),
        (WRONG, FLOPS, {"traced_flops": 2e9, "says": "less (-50%)"}),
        (WRONG, COUNT, {"num_matmuls": 15, "expected_num_matmuls": 22}),
        (GPU, f"{IN}forward", {"num_calls": 31, "matmul_share": 0.6, "says": "sgemm_128x64"}),
        (GPU, FLOPS, None),
        (GPU, COUNT, None),
        (GPU, f"{IN}whole_step", None),
        (profile(FUSED, expected={"forward": 2e9}), f"{IN}forward", {"says": "60%, attention 40%"}),
        (profile(FUSED, expected={"forward": 2e9}), FLOPS, None),
        (UNKNOWN, f"{IN}forward", {"matmul_share": 0}),
        (UNKNOWN, FLOPS, None),
        (SLOW, SOFTMAX, {"time_ratio": 0.5, "operation_ratio": 25.6, "says": "Fuse it"}),
        (FAST, SOFTMAX, {"operation_ratio": 1, "says": "for each operation."}),
        (profile(_attention(0.1, 0.1), head_dim=None), SOFTMAX, None),
        (profile(_attention(0.1, 0.0)), SOFTMAX, None),
    ],
)
def test_operators(records: list[Record], name: str, expected: Any) -> None:
    (block,) = answers.answer_profile(Evidence.of(records))
    check((block,), {name: expected})
    captions = " ".join(table.caption for table in block.tables)
    assert ("FLOPs" in captions) == any(each.name == FLOPS for each in block.findings)


def _stopwatch(seconds: float, machine: str = "laptop", **case: Any) -> Record:
    record = step_record(**{**MODEL, "hardware": machine, "phase": "forward", **case})
    return msgspec.structs.replace(
        record,
        environment=profile_environment(machine),
        metrics={**record.metrics, "step_time_s": Metric(value=seconds)},
    )


@pytest.mark.parametrize(
    ("stopwatch", "expected"),
    [
        (_stopwatch(0.95), {"traced_step_time_s": 1, "step_time_s": 0.95, "says": "alike (+5%)."}),
        (_stopwatch(0.5), {"says": ["more (+100%)", "times from the stopwatch"]}),
        (_stopwatch(2.0), {"says": "less (-50%)"}),
        (_stopwatch(0.95, device="cuda"), None),
        (_stopwatch(0.95, hardware="h100"), None),
        (_stopwatch(0.95, d_model=64), None),
        (_stopwatch(0.95, compile="whole"), None),
        (_stopwatch(0.0), None),
        (_stopwatch(0.95, "server", hardware="laptop"), None),
        (step_record(outcome="out_of_memory", **{**MODEL, "phase": "forward"}), None),
    ],
)
def test_a_trace_is_laid_beside_the_same_step_only(
    stopwatch: Record, expected: dict[str, Any] | None
) -> None:
    records = [*profile({"forward": FORWARD}, step_s=1.0), stopwatch]
    check(answers.answer_profile(Evidence.of(records)), {"trace_to_stopwatch": expected})


OLD: Ranges = {
    "forward": {("matmul", "aten::old"): (0.6, 1, 0), ("copy", "aten::mul"): (0.4, 1, 0)}
}
NEW: Ranges = {
    "forward": {("matmul", "aten::new"): (0.9, 1, 0), ("copy", "aten::mul"): (0.1, 1, 0)}
}


def _operators(block: Block) -> set[str]:
    return {row[0] for row in block.tables[1].rows}


@pytest.mark.parametrize("order", [1, -1], ids=["in order of time", "the newest first"])
def test_two_runs_on_one_machine_are_not_mixed(order: int) -> None:
    records = [*profile(OLD, time=EARLY), *profile(NEW, time=LATE)][::order]
    (block,) = answers.answer_profile(Evidence.of(records))
    assert _operators(block) == {"aten::new" if order == 1 else "aten::old", "aten::mul"}
    (block,) = answers.answer_profile(Evidence(records=tuple(records)))
    assert _operators(block) == {"aten::new", "aten::mul"}


def test_two_machines_are_not_mixed() -> None:
    records = [*profile(OLD), *profile(NEW, machine="server", time=LATE)]
    blocks = answers.answer_profile(Evidence(records=tuple(records)))
    assert [block.heading.rpartition("; ")[2] for block in blocks] == ["laptop", "server"]
    names = [{"aten::old", "aten::mul"}, {"aten::new", "aten::mul"}]
    assert [_operators(block) for block in blocks] == names
    assert [len(block.environments) for block in blocks] == [1, 1]
    kept = [_operators(block) for block in answers.answer_profile(Evidence.of(records))]
    assert kept[-1] == names[1]
    assert all(each in names for each in kept)


def test_what_is_no_profile_of_a_step_is_left_out() -> None:
    named = [
        msgspec.structs.replace(record, case={**record.case, "subject": "trace.json"})
        for record in operator_rows(OLD, "", profile_environment())
    ]
    assert answers.answer_profile(Evidence.of(named)) == ()


def test_a_step_can_be_matched_by_a_memory_timeline() -> None:
    assert find_kind("step").join_key == find_kind("memory_timeline").join_key
