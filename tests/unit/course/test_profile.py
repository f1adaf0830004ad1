"""Tests of the numbers of traced steps and their memory, for each run and machine."""

import re
from typing import Any

import msgspec
import pytest

from paceline.course import calculated, steps
from paceline.records import Metric, Record, find_kind
from paceline.reports.document import Block
from paceline.reports.record_sets import RecordSet
from paceline.traces.analysis import step_subject
from tests.unit import record_factory
from tests.unit.course.report_cases import check, make_record, question_of
from tests.unit.record_factory import EARLY, FORWARD, LATE, MODEL, TRAIN, Ranges, profile

pytestmark = pytest.mark.usefixtures("no_pictures")
MIB = 2**20
LAPTOP, SERVER = map(record_factory.profile_environment, ("laptop", "server"))
# A profile timestamps its records one by one, so they may be a second apart.
NEXT_SECOND = record_factory.profile_environment(time=EARLY.replace("00+", "01+", 1))


def _forward(*operators: tuple[str, str, float, float, float]) -> Ranges:
    return {"forward": {(work, name): figures for work, name, *figures in operators}}  # type: ignore[misc]


def _attention(softmax_s: float, matmul_s: float, **case: Any) -> list[Record]:
    matmuls = {("matmul", "aten::bmm"): (matmul_s, 2.0, 1e9)}
    softmax = {("softmax", "aten::_softmax"): (softmax_s, 2.0, 0.0)}
    inside = {"attention_scores": matmuls, "attention_values": matmuls}
    return profile({"forward": FORWARD, **inside, "attention_softmax": softmax}, **case)


COUNTED = profile(TRAIN, expected={"forward": 2e9, "backward": 4e9})
WRONG = profile(TRAIN, expected={"forward": 4e9}, num_layers=3)
# GPU kernels report no FLOPs, and fused attention contains its matmuls.
KERNELS = _forward(("matmul", "sgemm_128x64", 0.6, 31, 0), ("other", "kernel", 0.4, 9, 0))
FUSED = _forward(("matmul", "aten::mm", 0.6, 15, 1e9), ("attention", "aten::sdpa", 0.4, 2, 1e9))
GPU = profile(KERNELS, expected={"forward": 2e9})
INSIDE = profile(FUSED, expected={"forward": 2e9})
UNKNOWN = profile(_forward(("other", "kernel", 0.5, 1, 0)), expected={"forward": 2e9})
LONGEST, SOFTMAX, TRACE = "longest_operator", "softmax_to_matmuls", "trace_against_expectation"
OPERATORS, MEMORY = steps.longest_operator, steps.peak_memory


@pytest.mark.parametrize(
    ("records", "name", "expected"),
    [
        (COUNTED, TRACE, {"num_matmuls": 15, "expected_num_matmuls": 15}),
        (COUNTED, LONGEST, {"own_time_s": 0.6, "share": 0.6, "num_calls": 15, "says": "Forward"}),
        (COUNTED, LONGEST, {"own_time_s": 1.2, "matmul_share": 0.6, "all_matmul_share": 0.45}),
        (WRONG, TRACE, {"num_matmuls": 15, "expected_num_matmuls": 22}),
        (GPU, LONGEST, {"num_calls": 31, "matmul_share": 0.6, "says": "sgemm_128x64"}),
        (GPU, TRACE, {"num_matmuls": None}),
        (INSIDE, LONGEST, {"matmul_share": 0.6, "says": "aten::mm takes longest"}),
        (UNKNOWN, LONGEST, {"matmul_share": 0, "says": "Forward: kernel takes longest, 500 ms"}),
        (_attention(0.1, 0.1), SOFTMAX, {"time_ratio": 0.5, "operation_ratio": 25.6}),
        (_attention(0.1 / 25.6, 0.1), SOFTMAX, {"softmax_s": 0.1 / 25.6, "operation_ratio": 1}),
        (_attention(0.1, 0.1), SOFTMAX, {"matmul_s": 0.2, "matmul_operations": 256}),
        (_attention(0.1, 0.1, head_dim=None), SOFTMAX, None),
        (_attention(0.1, 0.0), SOFTMAX, None),
    ],
)
def test_operators(records: list[Record], name: str, expected: Any) -> None:
    check(OPERATORS, records, {name: expected})


@pytest.mark.parametrize(
    ("records", "counts"),
    [
        (COUNTED, [("2 G", "2 G", "1.0000"), ("4 G", "4 G", "1.0000")]),
        (WRONG, [("2 G", "4 G", "0.5000")]),
        (GPU, []),
        (INSIDE, []),
        (UNKNOWN, []),
    ],
)
def test_matmul_flops_stand_beside_those_of_the_formula(
    records: list[Record], counts: list[tuple[str, ...]]
) -> None:
    (block,) = question_of(OPERATORS).answer(RecordSet.of(records))
    tables = [table for table in block.tables if "FLOPs" in table.caption]
    assert [row[2:] for table in tables for row in table.rows] == counts
    assert len(tables) == bool(counts)


def test_a_forward_pass_has_no_other_phase() -> None:
    (block,) = question_of(OPERATORS).answer(RecordSet.of(GPU))
    assert [finding.name for finding in block.findings] == [LONGEST, TRACE]


@pytest.mark.parametrize(
    ("seconds", "case", "step_time_s"),
    [
        (0.95, {}, 0.95),
        (0.5, {}, 0.5),
        (0.0, {}, None),
        (None, {}, None),
        (0.95, {"environment": SERVER}, None),
        (0.95, {"device": "cuda"}, None),
        (0.95, {"hardware": "h100"}, None),
        (0.95, {"d_model": 64}, None),
        (0.95, {"compile": "whole"}, None),
    ],
)
def test_a_trace_is_laid_beside_the_same_step_only(
    seconds: Any, case: Any, step_time_s: float | None
) -> None:
    assert find_kind("step").join_key == find_kind("memory_timeline").join_key
    metrics = {} if seconds is None else {"step_time_s": Metric(value=seconds)}
    case = {**MODEL, "phase": "forward", "environment": LAPTOP, **case}
    stopwatch = record_factory.step_record(**case)
    records = [*profile({"forward": FORWARD}), msgspec.structs.replace(stopwatch, metrics=metrics)]
    check(OPERATORS, records, {TRACE: {"traced_step_time_s": 1, "step_time_s": step_time_s}})


OLD = _forward(("matmul", "aten::old", 0.6, 1, 0), ("copy", "aten::mul", 0.4, 1, 0))
NEW = _forward(("matmul", "aten::new", 0.9, 1, 0), ("copy", "aten::mul", 0.1, 1, 0))


def _operators(block: Block) -> set[str]:
    return {row[0] for row in block.tables[1].rows} - {"aten::mul"}


def test_two_runs_on_one_machine_are_not_mixed() -> None:
    records = (*profile(OLD, time=EARLY), *profile(NEW, time=LATE))
    for ordered, last in ((records, "aten::new"), (records[::-1], "aten::old")):
        for record_set, kept in (
            (RecordSet.of(ordered), last),
            (RecordSet(records=ordered), "aten::new"),
        ):
            (block,) = question_of(OPERATORS).answer(record_set)
            assert _operators(block) == {kept}


def test_two_machines_are_not_mixed_and_what_is_no_profile_of_a_step_is_left_out() -> None:
    check(OPERATORS, record_factory.operator_rows(OLD, "trace.json", LAPTOP), {})
    records = [*profile(OLD), *profile(NEW, machine="server", time=LATE)]
    blocks = question_of(OPERATORS).answer(RecordSet(records=tuple(records)))
    assert [block.heading.rpartition("; ")[2] for block in blocks] == ["laptop", "server"]
    assert [_operators(block) for block in blocks] == [{"aten::old"}, {"aten::new"}]
    assert [len(block.environments) for block in blocks] == [1, 1]
    kept = [_operators(block) for block in question_of(OPERATORS).answer(RecordSet.of(records))]
    assert kept[-1] == {"aten::new"}
    assert all(each in ({"aten::old"}, {"aten::new"}) for each in kept)


PARTS = ("parameters", "optimizer_state", "other", "gradients", "activations", "temporary")
STATES = {"parameters": 10, "optimizer_state": 20}
HALF, LONG = {"precision": "bfloat16"}, {"context": 512}


def _memory(**changes: Any) -> list[Record]:
    """Returns the memory at the peak, in MiB by part, and the prediction that a table needs."""
    parts = {name: changes.pop(name, 0) * MIB for name in PARTS}
    record = record_factory.memory_record(**{**MODEL, "phase": "train", **changes})
    metrics = {f"{name}_at_peak_bytes": Metric(value=size) for name, size in parts.items()}
    metrics = {**record.metrics, **metrics, "peak_bytes": Metric(value=sum(parts.values()))}
    record = msgspec.structs.replace(record, environment=LAPTOP, metrics=metrics)
    case = {"predicts": "memory_timeline", "environment": LAPTOP, **record.case}
    return [record, make_record("prediction", {"peak_bytes": 1}, **case)]


def _allocations(*allocations: tuple[Any, ...]) -> list[Record]:
    """Returns a step and its allocations, each given by number, size, environment and count."""
    records = _memory(**STATES)
    for number, size, environment, *count in allocations:
        case = {"subject": step_subject(records[0].case), "number": number, "category": "temporary"}
        case |= {"operator": f"aten::op{number}", "place": "layers.py", "environment": environment}
        metrics = {"size_bytes": size, "num_allocations": (*count, 1)[0]}
        records.append(make_record("allocation", metrics, **case))
    return records


LONGER = [*_memory(**LONG, **STATES, activations=80), *_memory(**STATES, activations=40)]
SHORTER = [*_memory(**STATES, temporary=9), *_memory(**LONG, **STATES, temporary=1)]
LOWER = [*_memory(**STATES, activations=90, temporary=20), *_memory(**HALF, **LONG, **STATES)]
LOWER += _memory(**HALF, **STATES, activations=85)
PHASES = [*_memory(phase="forward", other=30, **STATES), *_memory(**STATES)]
SERVED = (1, MIB, SERVER)
LATER = (3, MIB, record_factory.profile_environment(time=LATE))


@pytest.mark.parametrize(
    ("records", "mebibytes", "says"),
    [
        (LONGER, {"peak": 110}, "at context 512 in float32"),
        (LONGER, {"base_peak": 70, "peak": 110}, "at context 256 in float32 it is"),
        (LONGER, {"base_changed": 40, "changed": 80}, "difference is activations"),
        (SHORTER, {"base_peak": 39, "peak": 31, "changed": 1}, "is temporary"),
        (LOWER, {"base_peak": 140, "peak": 115}, "at context 256 in bfloat16"),
        (LOWER, {"base_changed": 20, "changed": 0}, "difference is temporary"),
        (PHASES, {"peak": 60}, "of forward"),
        (PHASES, {"peak": 30}, "of train"),
        (_memory(), None, ""),
    ],
)
def test_memory(records: list[Record], mebibytes: Any, says: Any) -> None:
    sizes = {f"{part}_bytes": size * MIB for part, size in (mebibytes or {}).items()}
    expected = None if mebibytes is None else {**sizes, "says": says}
    check(MEMORY, records, {"peak_memory": expected})


@pytest.mark.parametrize(
    ("allocations", "operators"),
    [
        # Only allocations of the same run are used.
        ([SERVED], None),
        ([SERVED, (2, 2 * MIB, LAPTOP)], ["aten::op2"]),
        ([(2, 9, LAPTOP), LATER], ["aten::op2"]),
        ([(4, MIB, NEXT_SECOND)], ["aten::op4"]),
        ([(2, 9, LAPTOP, 3), (1, MIB, LAPTOP)], ["aten::op1", "aten::op2"]),
    ],
)
def test_allocations_are_listed_by_size(
    allocations: list[tuple[Any, ...]], operators: list[str] | None
) -> None:
    (block,) = question_of(MEMORY).answer(RecordSet.of(_allocations(*allocations)))
    # What all rows share is in the caption.
    texts = [f"{table.caption} {table.rows}" for table in block.tables[1:]]
    listed = [re.findall(r"aten::op\d", text) for text in texts]
    assert listed == ([] if operators is None else [operators])


def test_the_longest_context_and_each_precision_with_its_float32_are_compared() -> None:
    (block,) = question_of(MEMORY).answer(RecordSet.of([*LOWER, *LONGER]))
    said = [finding.text.split(" is ")[0] for finding in block.findings]
    assert said == [
        "Peak memory of train at context 512 in float32",
        "Peak memory of train at context 256 in bfloat16",
        "Peak memory of train at context 512 in bfloat16",
    ]
    (block,) = question_of(MEMORY).answer(RecordSet.of(LOWER))
    assert ["512" in finding.text for finding in block.findings] == [False, False]


def test_the_calculated_model() -> None:
    expected = {
        "residual_bytes": 5 * MIB,
        "first_bytes": 51990 * MIB,
        "last_bytes": 60110 * MIB,
        "scores_bytes": 128 * MIB,
        "matrix_bytes": 100 * MIB,
    }
    check(calculated.course_model_memory, [], {"course_model_memory": expected})
