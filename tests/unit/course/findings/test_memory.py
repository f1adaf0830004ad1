"""Memory over steps in, findings out: the parts of the peak, and allocations of the same run."""

from typing import Any

import msgspec
import pytest

from paceline.course.answers import profile as answers
from paceline.records import Environment, Metric, Record
from paceline.reports.evidence.groups import Evidence
from tests.unit.course.profile_cases import (
    EARLY,
    LATE,
    MODEL,
    profile_environment,
    profile_record,
    subject_text,
)
from tests.unit.course.report_cases import check, no_drawing
from tests.unit.reports.factory import memory_record

PARTS = ("parameters", "optimizer_state", "other", "gradients", "activations", "temporary")
STATES = {"parameters": 10, "optimizer_state": 20}
HALF, LONG = {"precision": "bfloat16"}, {"context": 512}
MIB = 2**20


@pytest.fixture(autouse=True)
def _quick_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "draw_picture", no_drawing)


def _memory(environment: Environment | None = None, **changes: Any) -> list[Record]:
    """Memory at the peak in MiB by part, with the prediction that a table needs."""
    parts = {name: changes.pop(name, 0) * MIB for name in PARTS}
    record = memory_record(**{**MODEL, "phase": "train", **changes})
    metrics = {f"{name}_at_peak_bytes": Metric(value=size) for name, size in parts.items()}
    metrics["peak_bytes"] = Metric(value=sum(parts.values()))
    record = msgspec.structs.replace(
        record,
        environment=environment or profile_environment(),
        metrics={**record.metrics, **metrics},
    )
    case = {"predicts": "memory_timeline", **record.case}
    return [record, profile_record("prediction", case, record.environment, {"peak_bytes": 1})]


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        (
            [*_memory(**LONG, **STATES, activations=80), *_memory(**STATES, activations=40)],
            {
                "train_peak": {
                    "peak_bytes": 110 * MIB,
                    "part_bytes": 80 * MIB,
                    "share": 8 / 11,
                    "says": ["train at context 512 in float32", "activations"],
                },
                "train_peak_by_context": {
                    "first_peak_bytes": 70 * MIB,
                    "last_peak_bytes": 110 * MIB,
                    "first_part_bytes": 40 * MIB,
                    "says": ["more (+57%)", "largest change: activations"],
                },
                "largest_allocation": None,
            },
        ),
        (
            [*_memory(**STATES, temporary=9), *_memory(**LONG, **STATES, temporary=1)],
            {
                "train_peak_by_context": {
                    "last_part_bytes": MIB,
                    "says": ["less (-21%)", "temporary"],
                }
            },
        ),
        (
            [
                *_memory(**STATES, activations=90, temporary=20),
                *_memory(**HALF, **STATES, activations=85),
                *_memory(**HALF, **LONG, **STATES),
            ],
            {
                "train_peak_in_bfloat16": {
                    "first_peak_bytes": 140 * MIB,
                    "last_peak_bytes": 115 * MIB,
                    "says": ["less (-18%)", "largest change: temporary"],
                },
                "train_peak_by_context": None,
            },
        ),
        (
            [*_memory(phase="forward", other=30, **STATES), *_memory(**STATES)],
            {"forward_peak": {"share": 0.5, "says": "other"}, "train_peak": {"share": 2 / 3}},
        ),
        (_memory(), {"train_peak": None}),
    ],
)
def test_memory(records: list[Record], expected: dict[str, Any]) -> None:
    check(answers.answer_memory(Evidence.of(records)), expected)


def _allocation(number: int, size: int, environment: Environment, count: int = 1) -> Record:
    subject = subject_text({**MODEL, "phase": "train"})
    case = {"subject": subject, "number": number, "category": "temporary"}
    case |= {"operator": f"aten::op{number}", "place": "layers.py"}
    metrics = {"size_bytes": size, "num_allocations": count}
    return profile_record("allocation", case, environment, metrics)


LAPTOP, SERVER = profile_environment(), profile_environment("server")
# A profile stamps its records one by one, so they may be a second apart.
NEXT_SECOND = profile_environment(time=EARLY.replace("00+", "01+", 1))


@pytest.mark.parametrize(
    ("allocations", "expected"),
    [
        ([_allocation(1, MIB, SERVER)], None),
        ([_allocation(1, MIB, SERVER), _allocation(2, 2**10, LAPTOP)], {"size_bytes": 2**10}),
        (
            [_allocation(2, 2**10, LAPTOP), _allocation(3, MIB, profile_environment(time=LATE))],
            {"num_allocations": 1, "says": "temporary of aten::op2 at layers.py."},
        ),
        ([_allocation(4, 1, NEXT_SECOND)], {"size_bytes": 1}),
        (
            [
                _allocation(2, MIB, LAPTOP, 3),
                _allocation(1, MIB, LAPTOP),
                _allocation(3, 9, LAPTOP),
            ],
            {"size_bytes": MIB, "num_allocations": 4, "says": "aten::op1"},
        ),
    ],
)
def test_allocations_are_those_of_the_same_run(
    allocations: list[Record], expected: dict[str, Any] | None
) -> None:
    records = [*_memory(LAPTOP, **STATES), *allocations]
    check(answers.answer_memory(Evidence.of(records)), {"largest_allocation": expected})
