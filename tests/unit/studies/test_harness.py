"""Tests of what all studies share: turns, fresh processes and records."""

import os
import pathlib
import sys

import pytest

from paceline.records import RecordStore
from studies.harness.records import FaultRecords, record_comparison
from studies.harness.study import in_fresh_process, resident_peak_bytes
from studies.harness.turns import interleaved, timed


def test_every_way_runs_once_per_round_and_the_order_rotates() -> None:
    order: list[str] = []

    def run(name: str) -> int:
        order.append(name)
        return len(order)

    found = interleaved({name: lambda name=name: run(name) for name in "abc"}, 3, warmup=1)  # type: ignore[misc]
    assert ["".join(order[start : start + 3]) for start in range(0, 12, 3)] == [
        "cab",
        "abc",
        "bca",
        "cab",
    ]
    assert found == {"a": [4, 9, 11], "b": [5, 7, 12], "c": [6, 8, 10]}


def test_seconds_are_those_of_the_call() -> None:
    assert 0 <= timed(lambda: None)() < 1


def _facts() -> tuple[int, float, bool]:
    return os.getpid(), resident_peak_bytes(), "torch" in sys.modules


def test_a_fresh_process_has_nothing_of_this_one() -> None:
    pid, peak, has_torch = in_fresh_process(_facts)
    assert pid != os.getpid()
    assert 0 < peak < resident_peak_bytes()
    assert not has_torch


def test_a_comparison_is_recorded_with_its_rounds(tmp_path: pathlib.Path) -> None:
    store = tmp_path / "records.jsonl"
    case = {"subject": "ours", "baseline": "bare", "device": "cpu", "hardware": "a", "threads": 1}
    record_comparison(store, case, [2.0, 4.0, 6.0], [1.0, 2.0, 3.0], {"stall_s": [0.5] * 3})
    (record,) = RecordStore(store).read()
    assert record.case["rounds"] == 3
    assert record.metrics["time_ratio"].value == pytest.approx(2)
    assert record.metrics["stall_s"].value == 0.5


def test_faults_count_what_was_lost(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = FaultRecords(tmp_path / "records.jsonl")
    records.add("run", "none", 5, 0)
    assert records.exit_code == 0
    records.add("run", "SIGKILL", 5, ["a step is missing"], case={"seed": 1})
    assert records.exit_code == 1
    _, lost = RecordStore(tmp_path / "records.jsonl").read()
    assert (lost.metrics["num_survived"].value, lost.metrics["num_lost"].value) == (4, 1)
    assert "lost: a step is missing" in capsys.readouterr().out
