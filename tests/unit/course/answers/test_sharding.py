"""What is said of the time and memory of sharding is true of the figures."""

from collections.abc import Sequence
from typing import Any

import pytest

from paceline.course.answers import sharding as answers_sharding
from paceline.course.answers.sharding import answer_memory, answer_time
from paceline.records import Metric, Record, find_kind
from paceline.reports.evidence.groups import Evidence
from tests.unit.course.report_cases import no_drawing, sentences
from tests.unit.reports.factory import ENVIRONMENT

STEADY = (1.0, 0.999, 1.001, 1.0, 1.0, 1.0, 1.0)


def _optimizer(strategy: str, step: float, spread: Sequence[float], **case: Any) -> Record:
    usual: dict[str, Any] = dict.fromkeys(find_kind("optimizer").join_key, "x")
    usual |= {"strategy": strategy, "bucket_size_mb": None}
    return Record(
        kind="optimizer",
        case=usual | case,
        environment=ENVIRONMENT,
        metrics={
            "step_time_s": Metric.from_samples([step * factor for factor in spread]),
            "optimizer_time_s": Metric(value=step / 8),
        },
        outcome="ok",
    )


@pytest.mark.parametrize(
    ("step", "spread", "must", "must_not"),
    [
        (1.2, STEADY, ["1.2 times, longer than the unsharded one's 1 s"], ["told apart"]),
        (0.8, STEADY, ["0.8 times, shorter than the unsharded one's"], ["told apart"]),
        (1.02, STEADY, ["1.02 times the unsharded one's 1 s: the two cannot"], ["longer", "only"]),
        (1.8, (1.0, 1.0), ["1 s: longer, judged by 2 samples only"], ["longer than", "apart"]),
        (0.9, (1.0, 1.0), ["1 s: no longer, judged by 2 samples only"], ["shorter", "apart"]),
    ],
)
def test_the_time_of_sharding_is_judged_by_its_samples(
    step: float, spread: Sequence[float], must: list[str], must_not: list[str]
) -> None:
    pair = [
        _optimizer("torch_ddp", 1.0, spread, world_size=4),
        _optimizer("sharded_optimizer", step, spread, world_size=4),
    ]
    text = " ".join(sentences(answer_time(Evidence.of(pair))))
    for part in (*must, "among 4 ranks"):
        assert part in text
    for part in must_not:
        assert part not in text


def test_one_rank_divides_no_work() -> None:
    pair = [
        _optimizer(name, 1.0, STEADY, world_size=1) for name in ("torch_ddp", "sharded_optimizer")
    ]
    assert answer_time(Evidence.of(pair)) == ()


PARTS = ("parameters", "gradients", "optimizer_state", "buffers", "activations")


@pytest.mark.parametrize(
    ("peak", "said"),
    [(1.0, "1.00 GiB, as much"), (0.8, "MiB, 20% less"), (1.2, "1.20 GiB, 20% more")],
)
def test_a_peak_is_less_more_or_the_same(
    monkeypatch: pytest.MonkeyPatch, peak: float, said: str
) -> None:
    monkeypatch.setattr(answers_sharding, "draw_picture", no_drawing)

    def memory(strategy: str, peak: float) -> Record:
        record = _optimizer(strategy, 1.0, STEADY, world_size=2)
        for instant in ("after_init", "before_step", "after_step"):
            record.metrics[f"peak_{instant}_bytes"] = Metric(value=peak * 2**30)
            for part in PARTS:
                record.metrics[f"{instant}_{part}_bytes"] = Metric(value=peak * 2**30 / len(PARTS))
        return record

    pair = [memory("torch_ddp", 1.0), memory("sharded_optimizer", peak)]
    assert said in " ".join(sentences(answer_memory(Evidence.of(pair))))
