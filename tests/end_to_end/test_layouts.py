"""Tests of layouts through the command line: measured, compared with the plan, traced, drawn."""

import pathlib

import pytest

from tests import devices
from tests.end_to_end.test_communication import BIN, TORCHRUN, by_kind, run

PACELINE = str(BIN / "paceline")
MODEL = [
    *("--model", "bytes-34M", "--num-layers", "2", "--d-model", "64", "--num-heads", "2"),
    *("--context", "32", "--json", "--device", devices.of_commands()),
]
LAYOUTS = ["--layouts", "replicate=2,micro=2", "pipeline=2,micro=1", "tensor=2,micro=2"]


@pytest.mark.slow
def test_layouts_are_measured_beside_the_plan(tmp_path: pathlib.Path) -> None:
    short = ["--batch", "1", "2", "--time-limit-s", "4", "--store", "own.jsonl"]
    run(PACELINE, "calibrate", *MODEL, *short, cwd=tmp_path)
    rounds = ["--rounds", "2", "--warmup", "1", "--calibration", "own.jsonl"]
    records = run(PACELINE, "bench", "layout", *MODEL, *LAYOUTS, *rounds, cwd=tmp_path)
    measured, predicted = by_kind(records, "layout"), by_kind(records, "prediction")
    assert [record.case["layout"] for record in measured] == LAYOUTS[1:]
    assert [record.case["layout"] for record in predicted] == LAYOUTS[1:]
    assert all(len(record.metrics["step_time_s"].samples) == 2 for record in measured)


@pytest.mark.slow
def test_layouts_under_torchrun(tmp_path: pathlib.Path) -> None:
    rounds = ["--rounds", "2", "--warmup", "1"]
    records = run(*TORCHRUN, "bench", "layout", *MODEL, *LAYOUTS, *rounds, cwd=tmp_path)
    assert [record.case["layout"] for record in by_kind(records, "layout")] == LAYOUTS[1:]


@pytest.mark.slow
def test_pipelines_are_traced_and_drawn(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "lanes"
    layouts = [
        "--layouts",
        "pipeline=2,micro=1",
        "pipeline=2,interleave=2,micro=1",
        "tensor=2,micro=2",
    ]
    # Interleaved, each of the two ranks has two stages of a block or more.
    model = [*MODEL, "--num-layers", "4"]
    command = ["profile", "layout", *model, *layouts, "--rounds", "2", "--out", str(out)]
    records = run(PACELINE, *command, cwd=tmp_path)
    assert len(by_kind(records, "pipeline")) == 2
    *_, tensor = by_kind(records, "layout_trace")
    assert tensor.case["layout"] == "tensor=2,micro=2"
    assert tensor.metrics["exposed_communication_s"].value > 0
    predictions = by_kind(records, "prediction")
    assert [record.metrics["bubble"].value for record in predictions] == [1 / 8, 1 / 16]
    assert {path.name for path in out.iterdir()} == {
        "trace.json", "records.jsonl", "pipelines.png", "pipelines.svg",
    }  # fmt: skip
