"""Tests that a finished run is stored with its predictions and corrects the next."""

import pathlib
import shutil

import msgspec
import pytest

from paceline.predict.history import read_history
from paceline.training.forecast import Forecast
from paceline.training.run_directory import CONFIG, EXPECTATION, append_run_history
from paceline.training.toml_config import read_config

RUN = pathlib.Path(__file__).parents[3] / "results" / "training-run"


def test_a_run_is_remembered_once(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = tmp_path / "history.jsonl"
    monkeypatch.setenv("PACELINE_HISTORY", str(history))
    shutil.copytree(RUN, tmp_path / "run")
    config = read_config(tmp_path / "run" / CONFIG, (f"out={tmp_path / 'run'}",))
    expected = msgspec.json.decode((RUN / EXPECTATION).read_bytes(), type=Forecast)
    append_run_history(config)
    entries = {entry.quantity: entry for entry in read_history(history)}
    assert entries["step_time_s"].formula == expected.step_time_s
    assert entries["step_time_s"].predicted is not None
    assert entries["memory_bytes"].measured > 0
    assert all(entry.run == "run" for entry in entries.values())
    append_run_history(config)
    assert len(read_history(history)) == len(entries)


def test_five_runs_correct_the_sixth(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = tmp_path / "history.jsonl"
    monkeypatch.setenv("PACELINE_HISTORY", str(history))
    for number in range(6):
        shutil.copytree(RUN, tmp_path / f"run-{number}")
        out = tmp_path / f"run-{number}"
        append_run_history(read_config(out / CONFIG, (f"out={out}",)))
    steps = [entry for entry in read_history(history) if entry.quantity == "step_time_s"]
    uncorrected = [entry.predicted.value for entry in steps[:5] if entry.predicted is not None]
    assert uncorrected == [entry.formula for entry in steps[:5]]
    assert abs(steps[4].error or 0) > 0.01
    assert steps[5].is_inside
    assert steps[5].error == pytest.approx(0, abs=1e-9)
