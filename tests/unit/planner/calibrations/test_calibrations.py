"""Tests of calibrations: recovered constants, intervals outside the rows, strict files."""

import dataclasses
import pathlib

import msgspec
import numpy as np
import pytest

from paceline.core import ModelShape, ParallelLayout, UsageError
from paceline.planner.calibrations.calibration import (
    FrameworkCalibration,
    Residual,
    features,
    find_calibration,
    known_calibrations,
    match_calibration,
    read_calibrations,
    write_calibrations,
)
from paceline.planner.calibrations.cases import Case, group_cases, predictable
from paceline.planner.calibrations.fit import (
    Fit,
    build_calibrations,
    fit_cases,
    held_out_by,
    predict_groups,
)
from paceline.planner.calibrations.parameters import PRIORS
from paceline.planner.published import PublishedRun, published_runs
from paceline.predict.cost.layouts import Layouts, Workload

TRUE = {
    "matmul_share": 0.6,
    "memory_share": 0.8,
    "inner_share": 0.5,
    "outer_share": 0.5,
    "hidden": 0.7,
    "attention_share": 0.2,
}


def _run(model: str, context: int, tensor: int, micro_batch: int) -> PublishedRun:
    data = 16 // tensor
    return PublishedRun(
        id=f"{model}-{context}-{tensor}-{micro_batch}",
        source="test",
        framework="test",
        model=model,
        device="h100-sxm",
        precision="bf16",
        unit="s/iteration",
        measured=1.0,
        devices=16,
        context_length=context,
        global_batch=micro_batch * data * 2,
        micro_batch=micro_batch,
        tensor=tensor,
        data=data,
        zero=1,
    )


def _cases() -> list[Case]:
    """Returns runs whose measured times follow from known constants."""
    runs = [
        _run(model, context, tensor, micro_batch)
        for model in ("llama3-8B", "gpt3-175B", "llama3-70B")
        for context in (1024, 8192)
        for tensor, micro_batch in ((1, 1), (4, 4))
    ]
    cases = predictable(runs)
    truth = Fit(values=TRUE, offsets={})
    seconds = predict_groups(group_cases(cases), truth, len(cases))
    return [
        dataclasses.replace(case, step_s=float(its))
        for case, its in zip(cases, seconds, strict=True)
    ]


def test_a_fit_finds_the_constants_that_made_the_rows() -> None:
    cases = _cases()
    fit = fit_cases(cases, terms=("attention",))
    assert fit.values["matmul_share"] == pytest.approx(0.6, rel=0.02)
    assert fit.values["attention_share"] == pytest.approx(0.2, rel=0.05)
    predicted = predict_groups(group_cases(cases), fit, len(cases))
    assert predicted == pytest.approx([case.step_s for case in cases], rel=0.01)


def test_without_the_term_that_made_them_rows_are_missed() -> None:
    cases = _cases()
    fit = fit_cases(cases, terms=())
    predicted = predict_groups(group_cases(cases), fit, len(cases))
    errors = np.abs(predicted / np.array([case.step_s for case in cases]) - 1)
    assert errors.max() > 0.05


def test_a_model_is_held_out_or_a_number_of_devices() -> None:
    cases = _cases()
    assert set(held_out_by(cases)) == {"llama3-8B", "gpt3-175B", "llama3-70B"}
    assert set(held_out_by([case for case in cases if case.run.model == "llama3-8B"])) == {
        "16 devices"
    }


def _calibration() -> FrameworkCalibration:
    return FrameworkCalibration(
        name="test-h100-sxm-bfloat16",
        framework="test",
        device="h100-sxm",
        precision="bfloat16",
        rows=("a", "b"),
        residuals=tuple(
            Residual(row=str(n), model="m", one_host=n % 2 == 0, log_ratio=0.002 * n - 0.03)
            for n in range(31)
        ),
        seen={
            **dict.fromkeys(("devices", "tensor ranks", "pipeline stages"), (8.0, 64.0)),
            **dict.fromkeys(("context ranks",), (1.0, 1.0)),
            "context length": (2048.0, 8192.0),
            "d_model": (4096.0, 8192.0),
            "tokens in a pass": (2048.0, 16384.0),
        },
        constants=TRUE,
    )


def _layouts(replicas: int) -> tuple[Layouts, Workload]:
    shape = ModelShape(vocab_size=1000, d_model=4096, d_ff=8192, num_layers=64, num_heads=32)
    workload = Workload(
        shape=shape,
        precision=_calibration().training_precision,
        context_length=4096,
        micro_batch=1,
        num_micro_batches=8,
    )
    layout = ParallelLayout(tensor=8, pipeline=8, replicate=replicas)
    return Layouts.of([layout]), workload


def test_intervals_widen_by_half_for_every_doubling_and_say_so() -> None:
    calibration = _calibration()
    low, high = calibration.interval(*_layouts(1))
    assert float(low[0]) == pytest.approx(1 / float(high[0]))
    assert calibration.outside(*_layouts(1)) == ()
    _, wider = calibration.interval(*_layouts(4))
    assert np.log(wider[0]) == pytest.approx(2 * np.log(high[0]))
    (said,) = calibration.outside(*_layouts(4))
    assert said == "devices outside of 8 to 64, the range of the measured runs"
    assert features(*_layouts(4))["devices"] == [256]


def test_calibrations_are_read_as_they_were_written(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "own.jsonl"
    write_calibrations([_calibration()], path)
    (read,) = read_calibrations(path)
    assert read == _calibration()
    path.write_bytes(path.read_bytes().replace(b'"rows"', b'"lines"'))
    with pytest.raises(UsageError, match="line 1: not a calibration"):
        read_calibrations(path)


def test_the_calibrations_that_come_along_name_their_rows() -> None:
    known = {run.id for run in published_runs()}
    assert len({each.name for each in known_calibrations()}) == len(known_calibrations())
    for each in known_calibrations():
        assert set(each.rows) <= known
        assert each.residuals
        assert 0 < each.constants["matmul_share"] <= 1
        assert set(each.constants) <= set(PRIORS)
    assert sum(len(each.rows) for each in known_calibrations()) > 2_000


def test_finding_names_what_there_is() -> None:
    assert find_calibration("nemo", "h100-sxm-80gb", "bfloat16").name == "nemo-h100-sxm-bfloat16"
    assert find_calibration("llm-foundry", "h100-sxm", "bfloat16").framework == "llm-foundry"
    own = _calibration()
    others = [
        msgspec.structs.replace(own, precision="float8"),
        msgspec.structs.replace(own, name="later"),
    ]
    assert match_calibration([others[0], own, others[1]], "h100-sxm", "bfloat16") == own
    assert match_calibration([own], "h100-sxm", "bfloat16", framework="another") is None
    with pytest.raises(UsageError, match="no calibration of nemo for mi300x with bfloat16; there"):
        find_calibration("nemo", "mi300x", "bfloat16")
    with pytest.raises(UsageError, match="unknown calibration 'nemmo'"):
        find_calibration("nemmo", "h100-sxm", "bfloat16")


def test_rows_that_cannot_be_predicted_are_refused() -> None:
    with pytest.raises(UsageError, match="no row can be predicted"):
        build_calibrations([])
    incomplete = msgspec.structs.replace(_run("llama3-8B", 1024, 1, 1), global_batch=None)
    assert predictable([incomplete]) == []
