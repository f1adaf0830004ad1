"""What is said of memory over a step follows from the parts of its peak, and of its own run."""

from typing import Any

import msgspec
import pytest

from paceline.course.answers import profile as answers_profile
from paceline.course.answers.profile import answer_memory
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
from tests.unit.course.report_cases import no_drawing, sentences
from tests.unit.reports.factory import memory_record

PARTS = ("parameters", "optimizer_state", "other", "gradients", "activations", "temporary")
STATES = {"parameters": 10, "optimizer_state": 20}


@pytest.fixture(autouse=True)
def _quick_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers_profile, "draw_picture", no_drawing)


def _memory(environment: Environment | None = None, **changes: Any) -> list[Record]:
    """Memory at the peak in MiB by part, with the prediction that a table needs."""
    parts = {name: changes.pop(name) for name in list(changes) if name in PARTS}
    case = {**MODEL, "phase": "train", **changes}
    record = memory_record(**case)
    metrics = {f"{name}_at_peak_bytes": parts.get(name, 0) * 2**20 for name in PARTS}
    metrics["peak_bytes"] = sum(metrics.values())
    record = msgspec.structs.replace(
        record,
        environment=environment or profile_environment(),
        metrics={
            **record.metrics,
            **{name: Metric(value=value) for name, value in metrics.items()},
        },
    )
    prediction = profile_record(
        "prediction",
        {"predicts": "memory_timeline", **record.case},
        record.environment,
        {"peak_bytes": 1},
    )
    return [record, prediction]


@pytest.mark.parametrize(
    ("records", "must", "must_not"),
    [
        pytest.param(
            [*_memory(**STATES, activations=40), *_memory(context=512, **STATES, activations=80)],
            [
                "at context 512 peaks at 110.00 MiB; activations are the largest part, 73%",
                "grows by 40.00 MiB: activations change most, from 40.00 MiB to 80.00 MiB, 2 times "
                "as much; parameters and optimizer state stay as they are",
            ],
            ["first"],
            id="activations grow",
        ),
        pytest.param(
            [*_memory(**STATES, gradients=10), *_memory(context=512, **STATES, gradients=10)],
            ["stays the same: parameters, optimizer state and gradients stay as they are"],
            ["grows", "later step", "change most"],
            id="states hide what activations add",
        ),
        pytest.param(
            [*_memory(**STATES, temporary=9), *_memory(context=512, **STATES, temporary=1)],
            ["falls by 8.00 MiB: temporary tensors change most, from 9.00 MiB to 1.00 MiB"],
            ["grows"],
            id="the peak falls",
        ),
        pytest.param(
            [
                *_memory(**STATES, activations=90, temporary=20),
                *_memory(precision="bfloat16", **STATES, activations=85, temporary=0),
            ],
            ["is 115.00 MiB, -18% against float32: temporary tensors change most"],
            ["half", "activations change"],
            id="a smaller peak need not be one of activations",
        ),
        pytest.param(
            [
                *_memory(**STATES, activations=80),
                *_memory(precision="bfloat16", **STATES, activations=40),
            ],
            ["-36% against float32: activations change most, from 80.00 MiB to 40.00 MiB, 0.5 tim"],
            [],
            id="activations halve",
        ),
        pytest.param(
            _memory(other=30, **STATES), ["other tensors are the largest part, 50%"], [], id="other"
        ),
        pytest.param(_memory(), [], ["largest part"], id="nothing at all"),
    ],
)
def test_memory(records: list[Record], must: list[str], must_not: list[str]) -> None:
    (block,) = answer_memory(Evidence.of(records))
    said = "\n".join(block.findings)
    for text in must:
        assert text in said, said
    for text in must_not:
        assert text not in said, said


def _allocation(environment: Environment, number: int, size: int, count: int = 1) -> Record:
    case = {
        "subject": subject_text({**MODEL, "phase": "train"}),
        "number": number,
        "category": "temporary",
        "operator": f"aten::op{number}",
        "place": "layers.py",
    }
    return profile_record(
        "allocation", case, environment, {"size_bytes": size, "num_allocations": count}
    )


def test_allocations_are_those_of_the_same_run() -> None:
    laptop, server = profile_environment(), profile_environment("server")
    records = _memory(laptop, **STATES)
    assert "single allocation" not in _memory_said([*records, _allocation(server, 1, 2**20)])
    both = [*records, _allocation(server, 1, 2**20), _allocation(laptop, 2, 2**10)]
    assert "train) is 1.00 KiB, temporary of aten::op2 at layers.py." in _memory_said(both)
    again = _allocation(profile_environment(time=LATE), 3, 2**20)
    assert "op2" in _memory_said([*both, again])
    # A profile stamps its records one by one, so they may be a second apart.
    later = profile_environment(time=EARLY.replace("00+", "01+", 1))
    assert "op4" in _memory_said([*records, _allocation(later, 4, 1)])


def test_several_largest_allocations_are_called_several() -> None:
    environment = profile_environment()
    records = _memory(environment, **STATES)
    alike = [_allocation(environment, number, 2**20) for number in (1, 2)]
    assert "allocations (" in _memory_said([*records, *alike])
    assert "are 1.00 MiB each, among them" in _memory_said([*records, *alike])
    assert "are 1.00 MiB each" in _memory_said([*records, _allocation(environment, 1, 2**20, 3)])


def _memory_said(records: list[Record]) -> str:
    return "\n".join(sentences(answer_memory(Evidence.of(records))))
