"""What is said of the times of steps is true of them, and nothing is said that they do not tell."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from paceline.course.answers import step as answers_step
from paceline.course.answers.step import (
    answer_compiled_step,
    answer_precision,
    answer_sizes,
    answer_warmup,
)
from paceline.records import Metric, Record
from paceline.reports.evidence.groups import Evidence
from tests.unit.course.report_cases import no_drawing, sentences
from tests.unit.reports.factory import step_record

STEADY = (0.99, 1.0, 1.01)
MODEL: dict[str, Any] = {
    "vocab_size": 100,
    "d_model": 64,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 32,
    "tied_embeddings": False,
    "compile": "none",
    "activation_checkpointing": "none",
    "float32_matmul_precision": "highest",
    "optimizer": "adamw",
    "hardware": "laptop",
}
FLOPS = "model_flops_per_s"


@pytest.fixture(autouse=True)
def _quick_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers_step, "draw_picture", no_drawing)


def _step(
    forward: float = 0.1,
    backward: float = 0.2,
    optimizer: float = 0.1,
    *,
    factors: Sequence[float] = STEADY,
    flops_per_s: float = 1e9,
    **case: Any,
) -> Record:
    """A step whose samples are its times multiplied by factors."""
    times = {"forward": forward, "backward": backward, "optimizer": optimizer}
    times["step"] = sum(times.values())
    metrics = {
        f"{name}_time_s": Metric.from_samples([seconds * factor for factor in factors])
        for name, seconds in times.items()
    }
    record = step_record(**{**MODEL, **case})
    return msgspec.structs.replace(
        record, metrics={**record.metrics, **metrics, FLOPS: Metric(value=flops_per_s)}
    )


def _check(said: Sequence[str], must: Sequence[str], must_not: Sequence[str]) -> None:
    text = "\n".join(said)
    for part in must:
        assert part in text, text
    for part in must_not:
        assert part not in text, text


@pytest.mark.parametrize(
    ("records", "must", "must_not"),
    [
        pytest.param(
            [_step()],
            ["Backward takes longest: of small's 400 ms it takes 50%", "gives 2, with which"],
            ["does not agree", "grow", "dominates"],
            id="one model",
        ),
        pytest.param(
            [_step(0.1, 0.4)],
            ["Backward takes 4 times", "does not agree (+100%)"],
            ["something else than products"],
            id="backward is longer than products say",
        ),
        pytest.param(
            [_step(0.1, 0.29, activation_checkpointing="full", num_layers=20)],
            ["counting products, forward inside of backward included, gives 2.99", "agrees ("],
            ["gives 2,", "does not agree"],
            id="checkpointing computes forward again",
        ),
        pytest.param(
            [_step(activation_checkpointing="some")],
            ["Backward takes 2 times as long as forward."],
            ["counting products"],
            id="it is not known what is computed again",
        ),
        pytest.param(
            [_step(factors=(1.0,))],
            ["How much repeated steps differ is not known"],
            ["0.0%", "is small", "deviation"],
            id="one sample has no spread",
        ),
        pytest.param(
            [_step(), _step(factors=(1.0,), num_layers=4, model="medium")],
            ["1.0% of the mean (small), is small; that of medium is not known."],
            [],
            id="one model of two has one sample",
        ),
        pytest.param(
            [_step(factors=(0.8, 1.0, 1.2))],
            ["20.0% of the mean (small), is large"],
            ["is small"],
            id="samples differ",
        ),
        pytest.param(
            [_step(), _step(num_layers=20, model="medium", flops_per_s=2e9)],
            ["is 2 times, more than the smaller model's", "the smaller model leaves more"],
            ["lower precision", "caches"],
            id="the larger model computes faster",
        ),
        pytest.param(
            [_step(), _step(num_layers=20, model="medium", flops_per_s=5e8)],
            ["0.5 times, less than the smaller model's: the larger model leaves more"],
            ["no longer fits"],
            id="the larger model computes slower",
        ),
        pytest.param(
            [_step(), _step(num_layers=20, model="medium")],
            ["time grows about as the work does"],
            ["unused", "bounds both"],
            id="both compute as fast",
        ),
        pytest.param(
            [_step(flops_per_s=0.0), _step(num_layers=20, model="medium")],
            [],
            ["From small"],
            id="a rate of nothing",
        ),
        pytest.param(
            [_step(model="custom"), _step(model="custom", num_layers=20)],
            ["custom (95 k parameters)", "to custom (835 k parameters)"],
            [],
            id="shapes without a name are told apart by their size",
        ),
        pytest.param(
            [_step()],
            ["what this memory can move is not known here"],
            ["memory bounds it", "of the memory's"],
            id="the memory's rate is not known",
        ),
        pytest.param(
            [_step(hardware="h100-sxm")],
            ["of the memory's 3.35 TB/s."],
            ["not known here", "synchronised"],
            id="the memory's rate is known",
        ),
        pytest.param(
            [_step(hardware="h100-sxm", optimizer=1e-9)],
            ["either the timer was not synchronised, or caches hold the states"],
            [],
            id="faster than memory",
        ),
        pytest.param(
            [msgspec.structs.replace(_step(), case={**_step().case, "optimizer": "sgd"})],
            [],
            ["AdamW"],
            id="another optimizer moves other bytes",
        ),
        pytest.param(
            [
                _step(),
                step_record(outcome="out_of_memory", **{**MODEL, "num_layers": 9, "model": "xl"}),
            ],
            ["of small's"],
            ["xl"],
            id="what did not run is not spoken of",
        ),
    ],
)
def test_sizes(records: list[Record], must: list[str], must_not: list[str]) -> None:
    (block,) = answer_sizes(Evidence.of(records))
    _check(block.findings, must, must_not)


def test_steps_without_times_answer_nothing() -> None:
    assert answer_sizes(Evidence.of([_step(0.0)])) == ()
    partly = msgspec.structs.replace(_step(), metrics={"step_time_s": Metric(value=1.0)})
    assert answer_sizes(Evidence.of([partly])) == ()
    failed = step_record(outcome="failed", **MODEL)
    assert answer_sizes(Evidence.of([failed])) == ()


SLOW_FIRST = (3.0, 1.0, 1.01, 0.99, 1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("cold", "warm", "must", "must_not"),
    [
        pytest.param(
            SLOW_FIRST,
            STEADY,
            ["After 0 warm-up steps the first sample takes 1.2 s, 3 times", "also allocate"],
            ["noise", "no less"],
            id="the first step is slow",
        ),
        pytest.param(
            SLOW_FIRST, STEADY, ["the median, 400 ms and 400 ms, moves less"], [], id="medians stay"
        ),
        pytest.param(
            (1.3, 1.0, 0.7, 1.4, 0.8, 1.2, 0.9),
            STEADY,
            ["cannot be told from noise"],
            ["allocate"],
            id="a quarter more is noise where samples differ by as much",
        ),
        pytest.param(
            (1.2, 1.0, 1.01, 0.99, 1.0, 1.0, 1.0),
            STEADY,
            ["1.2 times the median", "also allocate"],
            ["noise"],
            id="less than a quarter more stands out where samples are steady",
        ),
        pytest.param(
            (2.0, 2.01, 1.99, 2.0, 2.0, 2.0, 2.0),
            STEADY,
            ["cannot be told from noise", "moves no less than the mean"],
            ["allocate"],
            id="a run that is slow throughout says nothing of its first step",
        ),
        pytest.param(
            (0.5, 1.0, 1.01, 0.99, 1.0, 1.0, 1.0),
            STEADY,
            ["no cost of a first step shows"],
            ["allocate"],
            id="the first step is fast",
        ),
        pytest.param(
            (3.0, 1.0, 1.01, 0.99, 1.0, 1.0),
            STEADY,
            ["of 5 more samples nothing is known of noise"],
            ["allocate"],
            id="too few samples to tell the first from",
        ),
        pytest.param(
            (3.0,),
            (1.0,),
            ["The median is 1.2 s after 0 warm-up steps and 400 ms after 5", "is not known"],
            ["first sample", "±", "noise", "The mean"],
            id="one sample each",
        ),
    ],
)
def test_warmup(
    cold: Sequence[float], warm: Sequence[float], must: list[str], must_not: list[str]
) -> None:
    records = [_step(factors=cold, warmup=0), _step(factors=warm, warmup=5)]
    (block,) = answer_warmup(Evidence.of(records))
    _check(block.findings, must, must_not)


def test_steps_that_do_not_say_how_they_were_warmed_up_are_left_out() -> None:
    first = _step(warmup=1)
    silent = msgspec.structs.replace(
        first, case={field: value for field, value in first.case.items() if field != "warmup"}
    )
    assert answer_warmup(Evidence.of([first, silent])) == ()
    (block,) = answer_warmup(Evidence.of([first, silent, _step(warmup=5)]))
    assert "after 1 warm-up step and" in "\n".join(block.findings)


@pytest.mark.parametrize(
    ("records", "must", "must_not"),
    [
        pytest.param(
            [_step(0.2, 0.4), _step(0.1, 0.2, precision="bfloat16")],
            [
                "in bfloat16 are 2 times as fast for small.",
                "takes 25% of the step of small in bfloat16 and 14% in float32.",
            ],
            ["matrix units", "not products", "little", "peaks"],
            id="a gain on a device that is not known",
        ),
        pytest.param(
            [
                _step(0.2, 0.4, hardware="a100-sxm-80gb"),
                _step(0.1, 0.2, precision="bfloat16", hardware="a100-sxm-80gb"),
            ],
            ["By its peaks the device multiplies 16 times as fast in bfloat16"],
            [],
            id="a gain on a device that is known",
        ),
        pytest.param(
            [
                _step(0.2, hardware="a100-sxm-80gb", float32_matmul_precision="high"),
                _step(
                    precision="bfloat16",
                    hardware="a100-sxm-80gb",
                    float32_matmul_precision="high",
                ),
            ],
            ["multiplies 2 times as fast in bfloat16"],
            ["16 times"],
            id="float32 that is rounded has another peak",
        ),
        pytest.param(
            [_step(0.11, 0.2), _step(0.1, 0.2, precision="bfloat16")],
            ["bfloat16 gains little, 1.03 at best"],
            ["nothing", "no units"],
            id="a small gain",
        ),
        pytest.param(
            [_step(0.1, 0.2), _step(0.2, 0.4, precision="float16")],
            ["are 0.5 times as fast", "float16 gains nothing here"],
            ["little", "grows"],
            id="a loss",
        ),
        pytest.param(
            [
                _step(model="custom"),
                _step(0.05, 0.1, precision="bfloat16", model="custom"),
                _step(1.0, 2.0, model="custom", num_layers=20),
                _step(0.25, 0.5, precision="bfloat16", model="custom", num_layers=20),
            ],
            [
                "2 times as fast for custom (95 k parameters) and 4 times as fast for custom (835",
                "the gain goes from 2.00 to 4.00",
            ],
            ["40 times", "0.2 times"],
            id="two shapes of one name are not divided by each other",
        ),
    ],
)
def test_precision(records: list[Record], must: list[str], must_not: list[str]) -> None:
    (block,) = answer_precision(Evidence.of(records))
    _check(block.findings, must, must_not)


def test_a_format_without_float32_of_the_same_model_answers_nothing() -> None:
    records = [_step(), _step(precision="bfloat16", num_layers=20)]
    assert answer_precision(Evidence.of(records)) == ()


@pytest.mark.parametrize(
    ("plain", "compiled", "factors", "must", "must_not"),
    [
        pytest.param(
            0.2,
            0.1,
            STEADY * 2,
            ["0.50 times the forward", "fuses elementwise"],
            ["pay"],
            id="faster",
        ),
        pytest.param(0.1, 0.2, STEADY * 2, ["does not pay"], ["fuses"], id="slower"),
        pytest.param(
            0.12,
            0.1,
            (0.9, 1.0, 1.1) * 2,
            ["less than the samples differ"],
            ["fuses", "pay", "products bound"],
            id="not to be told apart",
        ),
        pytest.param(0.2, 0.1, (1.0,), ["nothing is known of noise"], ["fuses"], id="one sample"),
    ],
)
def test_compiled_step(
    plain: float, compiled: float, factors: Sequence[float], must: list[str], must_not: list[str]
) -> None:
    records = [_step(plain, factors=factors), _step(compiled, factors=factors, compile="whole")]
    (block,) = answer_compiled_step(Evidence.of(records))
    _check(block.findings, must, must_not)
    assert block.pictures


def test_compiled_shapes_of_one_name_are_laid_beside_their_own() -> None:
    records = [
        _step(model="custom"),
        _step(model="custom", num_layers=20, compile="whole"),
    ]
    assert answer_compiled_step(Evidence.of(records)) == ()
    records.append(_step(1.0, model="custom", num_layers=20))
    said = sentences(answer_compiled_step(Evidence.of(records)))
    assert len(said) == 1
    assert "0.10 times the forward time" in said[0]
