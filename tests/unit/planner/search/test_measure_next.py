"""The run to measure next narrows the asked plan, and more than any other that was offered."""

import json
import pathlib

import numpy as np
import pytest

from paceline.accounting.named_model import find_model
from paceline.cli.main import main
from paceline.planner.calibrations.next_run import deviations_of, measured_covariance
from paceline.planner.calibrations.pooled import drawn_calibrations, measured_cases, pooled
from paceline.planner.search import measure_next
from paceline.planner.search.cluster_options import ClusterOptions
from paceline.planner.search.spec import calibrated_performance

ROWS = pathlib.Path(__file__).parents[4] / "examples" / "rows.jsonl"


def test_the_first_choice_narrows_most_and_every_one_narrows() -> None:
    cases = measured_cases(ROWS)
    posterior = pooled().prior.fit(cases)
    spec = ClusterOptions().spec(find_model("llama3-70B").shape, 128)
    (fitted,) = drawn_calibrations(cases)
    performance = calibrated_performance(fitted)
    now, found = measure_next.runs_to_measure(posterior, cases[0], spec, performance)
    widths = [now, *(each.half_width for each in found)]
    assert widths == sorted(widths, reverse=True)
    assert {each.devices for each in found} <= {8, 32, 128}
    assert all(each.global_batch == 512 * each.devices // 128 for each in found)

    asked = measure_next._choices(spec, performance)
    offered = [measure_next._case(cases[0], spec, choice) for choice in asked]
    slopes = measure_next._slopes(posterior, offered)
    for run in slopes:
        left = measured_covariance(run[np.newaxis], posterior.covariance)
        spread = np.sqrt(np.mean(deviations_of(slopes, left) ** 2))
        assert np.expm1(1.645 * spread) >= found[0].half_width - 1e-9


def test_the_command_names_the_runs(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "calibrate", str(ROWS), "--model", "llama3-8B", "--devices", "32"]
    assert main(asked) == 0
    assert "Measure next, for llama3-8B on 32 devices" in capsys.readouterr().out
    assert main([*asked, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    runs = [row["run"] for row in rows if row.get("kind") == "measure next"]
    assert [run["half_width"] for run in runs] == sorted(
        (run["half_width"] for run in runs), reverse=True
    )


def test_a_plan_that_fits_nowhere_has_no_next_run(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "calibrate", str(ROWS), "--model", "llama3-70B", "--devices", "7"]
    assert main(asked) == 2
    assert "no layout of the model fits 7 devices" in capsys.readouterr().err
