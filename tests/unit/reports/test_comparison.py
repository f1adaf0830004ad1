"""Tests that times are distinguished by their samples only, case by case of two stores."""

import json
import pathlib
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import quantile_test

from paceline.cli.main import main
from paceline.records import Metric, Record, RecordStore
from paceline.reports.comparison import compare, compare_stores, median_interval
from tests.unit.course.report_cases import NOISY, STEADY
from tests.unit.record_factory import make_record


def _metric(seconds: float, spread: Any) -> Metric:
    return Metric.from_samples([seconds * factor for factor in spread])


@settings(deadline=None)
@given(st.lists(st.floats(0.001, 1000.0), min_size=6, max_size=300))
def test_the_interval_is_that_of_the_quantile_test(values: list[float]) -> None:
    expected = quantile_test(values, p=0.5).confidence_interval(confidence_level=0.95)
    assert median_interval(values) == (expected.low, expected.high)


@pytest.mark.parametrize("in_turn", [True, False])
@pytest.mark.parametrize(
    ("ratio", "spread", "base", "by_rounds", "by_runs"),
    [
        (0.98, STEADY, (1.0,) * 7, "less", "alike"),
        (1.03, STEADY, STEADY, "more", "alike"),
        (0.98, NOISY, (1.0,) * 7, "alike", "alike"),
        # Rounds that are slow for both do not hide a difference.
        (1.03, NOISY, NOISY, "more", "alike"),
        # Consecutive runs may drift.
        (1.2, STEADY, STEADY, "more", "more"),
        (0.8, STEADY, STEADY, "less", "less"),
        # Different numbers of samples were not taken in turn, regardless of `in_turn`.
        (0.97, STEADY, STEADY[:6], "alike", "alike"),
        (1.2, STEADY, STEADY[:6], "more", "more"),
        (0.5, STEADY[:6], STEADY[:6], "less", "less"),
        (0.5, STEADY[:5], STEADY[:5], "unknown", "unknown"),
        (0.5, (1.0,), (1.0,), "unknown", "unknown"),
    ],
)
def test_a_ratio_is_judged_by_its_rounds_or_runs(
    ratio: float, spread: Any, base: Any, by_rounds: str, by_runs: str, in_turn: bool
) -> None:
    found = compare(_metric(ratio, spread), _metric(1.0, base), in_turn=in_turn)
    assert found is not None
    assert found.standing == (by_rounds if in_turn else by_runs)
    assert found.value == pytest.approx(ratio)


@pytest.mark.parametrize("in_turn", [True, False])
@pytest.mark.parametrize("base", [Metric(value=0.0), Metric(value=1.0, samples=(0.0, 1.0, 2.0))])
def test_nothing_is_divided_by_zero(base: Metric, in_turn: bool) -> None:
    assert compare(Metric(value=1.0, samples=(1.0,) * 3), base, in_turn=in_turn) is None


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
