"""Tests of ``paceline plan backtest`` without files: all predictions made on this machine."""

import json
import pathlib

import pytest

from paceline.cli.main import main
from paceline.core.plan import Estimate
from paceline.predict.history import HistoryEntry, append_history


def test_errors_and_coverage_of_all_runs(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "history.jsonl"
    monkeypatch.setenv("PACELINE_HISTORY", str(path))
    assert main(["plan", "backtest"]) == 2
    assert "no predictions yet; paceline loop" in capsys.readouterr().err
    append_history(
        path,
        [
            HistoryEntry(
                quantity="heldout_loss",
                run="loop/final",
                parameters=1000,
                world_size=2,
                threads=1,
                hardware="a machine",
                formula=None,
                predicted=Estimate(value=2.0, low=1.9, high=2.1),
                measured=2.05,
            )
        ],
    )
    assert main(["plan", "backtest"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "held-out loss 1 2.4% 2.4% 1 of 1" in shown
    assert main(["plan", "backtest", "--json"]) == 0
    (found,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (found["quantity"], found["num_inside"]) == ("heldout_loss", 1)
    assert main(["plan", "backtest", "--figure", "steps.png"]) == 2
    assert "need files of records" in capsys.readouterr().err
