"""Memory over steps in, findings out: the parts of the peak, and allocations of the same run."""

from typing import Any

import msgspec
import pytest

from paceline.course.answers import profile as answers
from paceline.records import Environment, Metric, Record
from paceline.reports.evidence.groups import Evidence
from paceline.reports.evidence.profile_runs import subject_of
from tests.unit.course.profile_cases import EARLY, LATE, MODEL, profile_environment, profile_record
from tests.unit.course.report_cases import check, no_drawing
from tests.unit.record_factory import memory_record

PARTS = ("parameters", "optimizer_state", "other", "gradients", "activations", "temporary")
STATES = {"parameters": 10, "optimizer_state": 20}
HALF, LONG = {"precision": "bfloat16"}, {"context": 512}
MIB = 2**20
LAPTOP, SERVER = profile_environment(), profile_environment("server")
TOMORROW = profile_environment(time=LATE)
# A profile stamps its records one by one, so they may be a second apart.
NEXT_SECOND = profile_environment(time=EARLY.replace("00+", "01+", 1))


@pytest.fixture(autouse=True)
def _quick_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "draw_picture", no_drawing)


def _memory(**changes: Any) -> list[Record]:
    """Memory at the peak in MiB by part, with the prediction that a table needs."""
    parts = {name: changes.pop(name, 0) * MIB for name in PARTS}
    record = memory_record(**{**MODEL, "phase": "train", **changes})
    metrics = {f"{name}_at_peak_bytes": Metric(value=size) for name, size in parts.items()}
    metrics = {**record.metrics, **metrics, "peak_bytes": Metric(value=sum(parts.values()))}
    record = msgspec.structs.replace(record, environment=LAPTOP, metrics=metrics)
    case = {"predicts": "memory_timeline", **record.case}
    return [record, profile_record("prediction", case, LAPTOP, {"peak_bytes": 1})]


LONGER = [*_memory(**LONG, **STATES, activations=80), *_memory(**STATES, activations=40)]
SHORTER = [*_memory(**STATES, temporary=9), *_memory(**LONG, **STATES, temporary=1)]
LOWER = [
    *_memory(**STATES, activations=90, temporary=20),
    *_memory(**HALF, **STATES, activations=85),
    *_memory(**HALF, **LONG, **STATES),
]
PHASES = [*_memory(phase="forward", other=30, **STATES), *_memory(**STATES)]


@pytest.mark.parametrize(
    ("records", "name", "mebibytes", "says"),
    [
        (LONGER, "train_peak", {"peak": 110, "part": 80}, ["at context 512 in float32", "(73%)"]),
        (LONGER, "train_peak_by_context", {"first_peak": 70, "last_peak": 110}, "more (+57%)"),
        (LONGER, "train_peak_by_context", {"first_part": 40, "last_part": 80}, ": activations,"),
        (SHORTER, "train_peak_by_context", {"last_part": 1}, ["less (-21%)", ": temporary,"]),
        (LOWER, "train_peak_in_bfloat16", {"first_peak": 140, "last_peak": 115}, "less (-18%)"),
        (LOWER, "train_peak_in_bfloat16", {"first_part": 20}, "largest change: temporary"),
        (LOWER, "train_peak_by_context", None, ""),
        (LOWER, "largest_allocation", None, ""),
        (PHASES, "forward_peak", {"peak": 60, "part": 30}, "other"),
        (PHASES, "train_peak", {"peak": 30, "part": 20}, "optimizer state"),
        (_memory(), "train_peak", None, ""),
    ],
)
def test_memory(records: list[Record], name: str, mebibytes: Any, says: Any) -> None:
    sizes = {f"{part}_bytes": size * MIB for part, size in (mebibytes or {}).items()}
    expected = None if mebibytes is None else {**sizes, "says": says}
    check(answers.answer_memory(Evidence.of(records)), {name: expected})


def _allocation(number: int, size: int, environment: Environment, count: int = 1) -> Record:
    case = {"subject": subject_of(PHASES[2]), "number": number, "category": "temporary"}
    case |= {"operator": f"aten::op{number}", "place": "layers.py"}
    metrics = {"size_bytes": size, "num_allocations": count}
    return profile_record("allocation", case, environment, metrics)


@pytest.mark.parametrize(
    ("allocations", "expected"),
    [
        ([(1, MIB, SERVER)], None),
        ([(1, MIB, SERVER), (2, 2**10, LAPTOP)], {"size_bytes": 2**10}),
        (
            [(2, 2**10, LAPTOP), (3, MIB, TOMORROW)],
            {"says": "temporary of aten::op2 at layers.py."},
        ),
        ([(4, 1, NEXT_SECOND)], {"size_bytes": 1, "num_allocations": 1}),
        ([(2, MIB, LAPTOP, 3), (1, MIB, LAPTOP), (3, 9, LAPTOP)], {"num_allocations": 4}),
        ([(2, 9, LAPTOP, 3), (1, MIB, LAPTOP)], {"size_bytes": MIB, "says": "aten::op1"}),
    ],
)
def test_allocations_are_those_of_the_same_run(allocations: list[Any], expected: Any) -> None:
    records = [*_memory(**STATES), *(_allocation(*each) for each in allocations)]
    check(answers.answer_memory(Evidence.of(records)), {"largest_allocation": expected})


def test_the_calculated_model() -> None:
    blocks = answers.calculate_memory(Evidence.of([]))
    check(blocks, {"residual_stream": {"first_bytes": 5 * MIB}})
    check(blocks, {"peak_by_context": {"first_bytes": 51990 * MIB, "last_bytes": 60110 * MIB}})
    check(blocks, {"largest_allocation": {"scores_bytes": 128 * MIB, "matrix_bytes": 100 * MIB}})
