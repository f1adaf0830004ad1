"""Tests of calibration, prediction, measurement and backtest through the command line."""

import json
import pathlib
import subprocess

import pytest

from paceline.records import CaseValue, Record, join_key
from tests.end_to_end.test_communication import BIN, run

PACELINE = str(BIN / "paceline")
RESULTS = pathlib.Path(__file__).parents[2] / "results"
SMALL = ["--model", "bytes-6M", "--batch", "1", "--device", "cpu"]
CALIBRATE = ["calibrate", *SMALL, "--context", "32", "--time-limit-s", "2", "--json"]


def _quantities(records: list[Record]) -> set[CaseValue]:
    return {record.case["quantity"] for record in records}


@pytest.mark.slow
def test_a_prediction_joins_its_measurement(tmp_path: pathlib.Path) -> None:
    measured = run(PACELINE, *CALIBRATE, "--store", "machine.jsonl", cwd=tmp_path)
    assert _quantities(measured) == {
        *("linear", "attention", "stream", "copy", "call", "optimizer"),
        *("engine", "collective", "contention"),
    }
    assert all(record.case["world_size"] == 2 for record in measured)
    strategies = ["--strategies", "none", "flat", "ddp"]
    batch = ["--model", "bytes-6M", "--batch", "1", "--context", "32"]
    store = ["--store", "steps.jsonl"]
    question = ["plan", "step", "--calibration", "machine.jsonl", *batch, *strategies, *store]
    predicted = run(PACELINE, *question, "--json", cwd=tmp_path)
    assert [record.case["strategy"] for record in predicted] == ["none", "flat", "ddp"]
    rounds = ["--warmup", "1", "--rounds", "2", "--device", "cpu"]
    steps = run(
        PACELINE, "bench", "ddp", *batch, *strategies, *rounds, *store, "--json", cwd=tmp_path
    )
    assert [join_key(record) for record in predicted] == [join_key(record) for record in steps]
    few = subprocess.run(
        [PACELINE, "plan", "backtest", "steps.jsonl", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    *cases, summary = map(json.loads, few.stdout.splitlines())
    assert [case["predicted"]["value"] for case in cases] == pytest.approx(
        [record.metrics["step_time_s"].value for record in predicted]
    )
    assert (summary["num_cases"], summary["coverage"]) == (3, None)


@pytest.mark.slow
def test_a_rank_alone_has_nobody_to_send_to(tmp_path: pathlib.Path) -> None:
    alone = run(PACELINE, *CALIBRATE, "--world-size", "1", cwd=tmp_path)
    assert _quantities(alone) == {*("linear", "attention", "stream", "copy", "call", "optimizer")}


def test_a_store_without_a_calibration_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    refused = subprocess.run(
        [PACELINE, "plan", "step", "--calibration", "empty.jsonl"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert refused.returncode == 2
    assert "no calibration in it; run paceline calibrate" in refused.stderr
    missing = subprocess.run(
        [PACELINE, "plan", "step", "--calibration", "nowhere.jsonl"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert missing.returncode == 2
    assert "paceline calibrate --store nowhere.jsonl makes one" in missing.stderr


def test_the_committed_backtest_keeps_what_the_docs_say(tmp_path: pathlib.Path) -> None:
    records = str(RESULTS / "step-backtest.jsonl")
    backtested = subprocess.run(
        [PACELINE, "plan", "backtest", records, "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    *_, last = backtested.stdout.splitlines()
    summary = json.loads(last)
    assert summary["num_cases"] >= 60
    assert summary["median_error"] <= 0.08
    assert summary["ninetieth_error"] <= 0.20
    assert summary["coverage"] >= 0.80
    assert summary["median_width"] < 0.20
    question = ["--calibration", records, "--backtest", records, "--batch", "5"]
    predicted = run(PACELINE, "plan", "step", *question, "--json", cwd=tmp_path)
    # One rank, and two ranks on three kinds of links.
    assert len({record.case.get("link_rate_bits_per_s") for record in predicted}) == 3
    for record in predicted:
        step = record.metrics["step_time_s"]
        assert step.low is not None
        assert step.high is not None
        assert step.low < step.value < step.high
