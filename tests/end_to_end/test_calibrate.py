"""Calibration, prediction, measurement and ledger through the command line."""

import pathlib
import subprocess

from paceline.records import CaseValue, Record, join_key
from tests.end_to_end.test_communication import BIN, run

PACELINE = str(BIN / "paceline")
SMALL = ["--model", "bytes-6M", "--batch", "1", "--device", "cpu"]
CALIBRATE = ["calibrate", *SMALL, "--context", "32", "--time-limit-s", "2", "--json"]


def _quantities(records: list[Record]) -> set[CaseValue]:
    return {record.case["quantity"] for record in records}


def test_a_prediction_joins_its_measurement(tmp_path: pathlib.Path) -> None:
    measured = run(PACELINE, *CALIBRATE, "--store", "machine.jsonl", cwd=tmp_path)
    assert _quantities(measured) == {
        *("linear", "attention", "stream", "copy", "call", "optimizer"),
        *("collective", "contention"),
    }
    assert all(record.case["world_size"] == 2 for record in measured)
    strategies = ["--strategies", "none", "flat", "bucketed"]
    batch = ["--model", "bytes-6M", "--batch", "1", "--context", "32"]
    store = ["--store", "ledger.jsonl"]
    question = ["plan", "step", "--calibration", "machine.jsonl", *batch, *strategies, *store]
    predicted = run(PACELINE, *question, "--json", cwd=tmp_path)
    assert [record.case["strategy"] for record in predicted] == ["none", "flat", "bucketed"]
    rounds = ["--warmup", "1", "--rounds", "2", "--device", "cpu"]
    steps = run(
        PACELINE, "bench", "ddp", *batch, *strategies, *rounds, *store, "--json", cwd=tmp_path
    )
    assert [join_key(record) for record in predicted] == [join_key(record) for record in steps]
    for prediction, step in zip(predicted, steps, strict=True):
        # In two seconds and beside other tests; results/step-ledger.jsonl tells how good they are.
        ratio = prediction.metrics["step_time_s"].value / step.metrics["step_time_s"].value
        assert 0.2 < ratio < 5

    refused = subprocess.run(
        [PACELINE, "plan", "ledger", "ledger.jsonl"], cwd=tmp_path, capture_output=True, text=True
    )
    assert refused.returncode == 2
    assert "2 measured cases are too few" in refused.stderr


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
