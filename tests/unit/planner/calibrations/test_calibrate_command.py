"""Tests of ``paceline plan calibrate``: a user's rows become a calibration for plan search."""

import json
import pathlib

import pytest

from paceline.cli.main import main
from paceline.planner.calibrations.pooled import measured_cases

ROWS = pathlib.Path(__file__).parents[4] / "examples" / "rows.jsonl"


def test_own_rows_become_a_calibration_that_a_search_takes(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.jsonl"
    assert main(["plan", "calibrate", str(ROWS), "--out", str(own), "--json"]) == 0
    (made,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert made["name"] == "my-trainer-h100-sxm-bfloat16"
    assert made["rows"] == 3
    assert 0.3 < made["matmul_share"] <= 1

    search = ["plan", "search", "--model", "llama3-8b", "--devices", "16", "--batch-tokens", "512K"]
    assert main([*search, "--calibration", str(own), "--json", "--no-advice"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    own_best = next(row for row in rows if row["kind"] == "layout")
    assert rows[0]["calibration"] == "my-trainer-h100-sxm-bfloat16"

    assert main([*search, "--json", "--no-advice"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    best = next(row for row in rows if row["kind"] == "layout")
    assert own_best["choice"]["step_time_s"] != best["choice"]["step_time_s"]


def test_the_table_names_what_was_fitted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "calibrate", str(ROWS)]) == 0
    shown = capsys.readouterr().out
    assert "my-trainer-h100-sxm-bfloat16" in shown
    assert "held out" in shown


def test_rows_may_name_dtypes_as_plan_search_does(tmp_path: pathlib.Path) -> None:
    for named, dtype in (("float16", "float16"), ("bfloat16", "bfloat16"), ("float8", "float8")):
        path = tmp_path / "rows.jsonl"
        path.write_text(ROWS.read_text().splitlines()[0].replace('"bf16"', f'"{named}"'))
        assert [case.dtype for case in measured_cases(path)] == [dtype]


def test_rows_may_name_devices_in_any_case(tmp_path: pathlib.Path) -> None:
    for named, device in (("H100-SXM", "h100-sxm"), ("H100", "h100-sxm"), ("GB200", "gb200")):
        path = tmp_path / "rows.jsonl"
        path.write_text(ROWS.read_text().splitlines()[0].replace('"h100-sxm"', f'"{named}"'))
        assert [case.device for case in measured_cases(path)] == [device]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"framework": "x"}', "line 1"),
        ("not json", "line 1"),
        (
            ROWS.read_text().splitlines()[0].replace('"devices": 8', '"devices": 7'),
            "line 1: cannot be predicted: data x tensor x pipeline x context is 8, and devices",
        ),
        (
            ROWS.read_text().splitlines()[0].replace('"data": 8, ', ""),
            "line 1: cannot be predicted: it needs model, data",
        ),
        (
            ROWS.read_text().splitlines()[0].replace('"global_batch": 128', '"global_batch": 12'),
            "a global_batch of 12 is no multiple of 8 data-parallel ranks x a micro_batch of 1",
        ),
        (
            ROWS.read_text().splitlines()[0].replace("8200", "820000"),
            "line 1: faster than the device: 820,000 tokens/s/device are 4,266% of",
        ),
        (
            ROWS.read_text()
            .splitlines()[0]
            .replace("tokens/s/device", "s/iteration")
            .replace("8200", "0.82"),
            "% of the 989 TFLOP/s that h100-sxm reaches in bfloat16; correct measured, its unit",
        ),
        ("", "no measured run in it"),
    ],
)
def test_rows_that_cannot_be_used_are_named(
    line: str, said: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(line + "\n")
    assert main(["plan", "calibrate", str(path)]) == 2
    assert said in capsys.readouterr().err
