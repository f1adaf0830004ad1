"""Tests of comparing two stores by case: regressions, noise, and the exit code of the gate."""

import json
import pathlib
import random

import pytest

from paceline.cli.main import main
from paceline.records import Metric, Record, RecordStore
from paceline.reports.evidence.comparison import compare_stores
from tests.unit.record_factory import make_record


def _steps(seconds: float, *, noise: float = 0.01, seed: int = 0, **case: str) -> Record:
    chance = random.Random(seed)
    samples = [seconds * chance.uniform(1 - noise, 1 + noise) for _ in range(20)]
    return make_record("step", {"step_time_s": samples, "peak_bytes": 1e9}, **case)


def test_what_is_slower_beyond_noise_and_tolerance_is_worse() -> None:
    before = [_steps(0.1, model="small"), _steps(0.2, model="large")]
    after = [_steps(0.12, model="small", seed=1), _steps(0.2, model="large", seed=1)]
    found = compare_stores(before, after, 0.05)
    assert [(each.record.case["model"], each.metric) for each in found.worse] == [
        ("small", "step_time_s")
    ]
    assert found.worse[0] == found.changes[0]
    assert compare_stores(after, before, 0.05).changes[-1].verdict == "better"


def test_noise_is_not_a_regression() -> None:
    noisy = [_steps(0.1, noise=0.5), _steps(0.106, noise=0.5, seed=3)]
    assert not compare_stores(noisy[:1], noisy[1:], 0.05).worse


def test_bytes_have_no_noise() -> None:
    larger = _steps(0.1, seed=1)
    larger.metrics["peak_bytes"] = Metric(value=1.2e9)
    (change,) = compare_stores([_steps(0.1)], [larger], 0.05).worse
    assert (change.metric, change.ratio.value) == ("peak_bytes", pytest.approx(1.2))


def test_cases_of_one_store_only_are_counted() -> None:
    found = compare_stores(
        [_steps(0.1, model="small"), _steps(0.1, model="medium")],
        [_steps(0.1, model="small"), make_record("step", {}, outcome="failed", model="medium")],
        0.05,
    )
    assert (found.num_only_before, found.num_only_after) == (1, 0)


def test_the_gate(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, seconds in (("main", 0.1), ("change", 0.15)):
        RecordStore(tmp_path / f"{name}.jsonl").append(_steps(seconds))
    main_store, change = str(tmp_path / "main.jsonl"), str(tmp_path / "change.jsonl")
    assert main(["compare", main_store, change]) == 1
    assert "1 worse by more than 5%, 1 alike, 0 better" in capsys.readouterr().out
    assert main(["compare", main_store, change, "--tolerance", "0.6"]) == 0
    assert main(["compare", main_store, main_store]) == 0
    capsys.readouterr()
    assert main(["compare", change, main_store, "--json"]) == 0
    verdicts = [json.loads(line)["verdict"] for line in capsys.readouterr().out.splitlines()]
    assert verdicts == ["alike", "better"]
    RecordStore(tmp_path / "other.jsonl").append(_steps(0.1, model="another"))
    assert main(["compare", main_store, str(tmp_path / "other.jsonl")]) == 2
    assert "no case in common" in capsys.readouterr().err
    assert main(["compare", main_store, change, "--tolerance", "-1"]) == 2
