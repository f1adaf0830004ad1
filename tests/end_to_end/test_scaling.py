"""Tests of ``paceline scaling`` as typed by a user; the first command runs in a subprocess."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import pytest

from paceline.records.store import decode_record
from paceline.scaling import synthetic_sweep
from studies.scaling.fake_training_service import FakeTrainingService, random_truth, serve
from tests.processes import call_paceline, paceline
from tests.unit.scaling.surfaces import SURFACE

ROOT = pathlib.Path(__file__).parents[2]


def scaling(
    *arguments: str, cwd: pathlib.Path, exit_code: int = 0
) -> subprocess.CompletedProcess[str]:
    result = call_paceline(cwd, "scaling", *arguments)
    assert result.returncode == exit_code, result.stderr + result.stdout
    return result


@pytest.fixture
def runs(tmp_path: pathlib.Path) -> pathlib.Path:
    sweep = synthetic_sweep(SURFACE, noise=0.002)
    rows = [
        {"parameters": size, "compute_budget": compute, "final_loss": loss}
        for size, compute, loss in zip(sweep.parameters, sweep.compute, sweep.loss, strict=True)
    ]
    rows.append(rows[0] | {"final_loss": float("nan")})
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(rows))
    return path


def test_fit_prints_one_record_per_method_and_budget(runs: pathlib.Path) -> None:
    budgets = ["--budgets", "1e23", "1e24"]
    result = paceline(
        runs.parent, "scaling", "fit", "runs.json", *budgets, "--draws", "100", "--json"
    )
    assert result.returncode == 0, result.stderr
    records = [decode_record(line.encode()) for line in result.stdout.splitlines()]
    methods = ("lowest_run", "parabola", "huber", "parametric")
    assert [record.case for record in records] == [
        {"method": method, "compute_budget": budget}
        for budget in (1e23, 1e24)
        for method in methods
    ]
    for record in records:
        assert set(record.metrics) == {"parameters", "tokens", "loss"}
        for metric in record.metrics.values():
            assert metric.low is not None
            assert metric.high is not None
            assert metric.low <= metric.value <= metric.high
    answer = records[-1].metrics["parameters"]
    assert answer.value == pytest.approx(float(SURFACE.optimal_parameters(1e24)), rel=0.2)
    assert any(warning.startswith("far_extrapolation") for warning in records[-1].warnings)
    assert "row 73: no_loss: final_loss is nan" in result.stderr


def test_fit_for_people_and_its_pictures(runs: pathlib.Path) -> None:
    result = scaling("fit", "runs.json", "--draws", "50", "--plots", "out", cwd=runs.parent)
    for words in ("parametric", "FLOPs wasted", "heads of 128", "far_extrapolation"):
        assert words in result.stdout
    assert len(list((runs.parent / "out").glob("scaling-*.png"))) == 4


def test_check_explains_a_wrong_answer(runs: pathlib.Path) -> None:
    answer = ["--budget", "1e24", "--parameters", "5e10", "--tokens", "1e12"]
    result = scaling("check", "runs.json", *answer, "--draws", "20", "--json", cwd=runs.parent)
    record = decode_record(result.stdout.encode())
    assert [warning.split(":")[0] for warning in record.warnings] == [
        "inconsistent_compute",
        "wrong_size",
    ]
    assert record.metrics["loss"].value > record.metrics["best_loss"].value
    assert 0 < record.metrics["wasted"].value < 1
    printed = [f"{value:.2g}" for value in dataclasses.astuple(SURFACE)]
    result = scaling(
        *("check", "runs.json", "--budget", "1e24", "--coefficients", *printed, "--draws", "20"),
        cwd=runs.parent,
    )
    assert "rounded_coefficients" in result.stdout


def test_design_proposes_and_buys(tmp_path: pathlib.Path) -> None:
    common = ["--budget", "3e17", "--target", "1e19"]
    proposed = scaling("design", *common, "--json", cwd=tmp_path).stdout.splitlines()
    *records, answer = [decode_record(line.encode()) for line in proposed]
    assert answer.case == {"method": "design", "compute_budget": 1e19}
    assert answer.metrics["parameters"].high is not None
    assert sum(float(str(record.case["compute_budget"])) for record in records) <= 3e17
    assert all("final_loss" not in record.metrics for record in records)
    service = FakeTrainingService(random_truth(1))
    with serve(service) as address:
        script = [sys.executable, str(ROOT / "course" / "buy_runs.py")]
        result = subprocess.run([*script, address, *common], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert service.flops_used <= 3e17
    assert "best N at 1e+19 FLOPs" in result.stderr
    # The bought runs form a sweep that can be fitted.
    (tmp_path / "bought.jsonl").write_text(result.stdout)
    lost = subprocess.run([*script, "nowhere", *common], capture_output=True, text=True)
    assert lost.returncode == 2
    assert lost.stderr == "error: nowhere: an address such as http://localhost:8000 is needed\n"
    fitted = scaling(
        *("fit", "bought.jsonl", "--budgets", "1e19", "--draws", "20", "--json"), cwd=tmp_path
    )
    assert decode_record(fitted.stdout.splitlines()[-1].encode()).case["method"] == "parametric"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["fit", "none.json"], "none.json: cannot read the runs"),
        (["fit", "bad.json"], "bad.json: row 1: parameters is missing"),
        (["fit", "runs.json", "--budgets", "-1"], "budgets must be positive"),
        (["fit", "runs.json", "--draws", "1"], "--draws must be at least 2"),
        (["check", "runs.json", "--budget", "1e24"], "nothing to check"),
        (["check", "runs.json", "--budget", "0", "--parameters", "1e9"], "--budget is 0"),
        (["check", "runs.json", "--budget", "1e24", "--parameters", "-1"], "--parameters is -1"),
        (["design", "--budget", "1", "--target", "1e19"], "buys no run"),
        (["design", "--budget", "1e18", "--target", "nan"], "a target of nan"),
        (["design", "--budget", "1e14", "--target", "1e19"], "aim lower than 1e+19 FLOPs"),
        (["design", "--budget", "1", "--target", "1e19", "--sizes", "-1"], "--sizes is -1"),
        (
            [
                *("design", "--budget", "1", "--target", "1e19", "--sizes", "1e7"),
                *("--candidates", "none.csv"),
            ],
            "--sizes and --candidates",
        ),
    ],
)
def test_mistakes(runs: pathlib.Path, arguments: list[str], complaint: str) -> None:
    (runs.parent / "bad.json").write_text("[{}]")
    result = scaling(*arguments, cwd=runs.parent, exit_code=2)
    assert complaint in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_the_example() -> None:
    result = subprocess.run(
        [sys.executable, ROOT / "examples" / "compute_optimal.py"],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = result.stdout.splitlines()
    assert lines[0].startswith("parametric: N = ")
    assert lines[-1].startswith("truth: N = ")
