"""Tests of row checks: invalid numbers are errors; failed runs are left out and reported."""

import json
import math
import pathlib

import numpy as np
import pytest

from paceline.core.errors import UsageError
from paceline.scaling import Sweep, read_sweep
from paceline.scaling.sweep import sweep_from_rows

GOOD = {"parameters": 1e8, "compute_budget": 6e18, "final_loss": 3.0}


def test_tokens_and_compute_follow_from_each_other() -> None:
    sweep = sweep_from_rows([GOOD, {"parameters": 1e8, "tokens": 2e10, "final_loss": 2.9}], "runs")
    np.testing.assert_allclose(sweep.tokens, [1e10, 2e10])
    np.testing.assert_allclose(sweep.compute, [6e18, 1.2e19])


def test_runs_of_nearly_one_budget_belong_together() -> None:
    budgets = [1.00e18, 1.03e18, 3e18, 1.01e18]
    rows = [GOOD | {"compute_budget": budget, "parameters": 1e8 + budget} for budget in budgets]
    sweep = sweep_from_rows(rows, "runs")
    assert sweep.budget_index.tolist() == [0, 0, 1, 0]
    assert sweep.budgets[1] == pytest.approx(3e18)


def test_many_neighbouring_budgets_do_not_become_one() -> None:
    rows = [GOOD | {"compute_budget": 1e18 * 1.04**number} for number in range(40)]
    sweep = sweep_from_rows(rows, "runs")
    for group in np.unique(sweep.budget_index):
        members = sweep.compute[sweep.budget_index == group]
        assert members.max() / members.min() < 1.06


def test_runs_that_went_wrong_are_left_out_and_told() -> None:
    rows = [
        GOOD,
        GOOD,
        GOOD | {"final_loss": 3.1},
        GOOD | {"final_loss": math.nan},
        GOOD | {"final_loss": None},
        GOOD | {"final_loss": math.inf},
        GOOD | {"outcome": "diverged"},
        GOOD | {"outcome": "timeout", "final_loss": None},
        GOOD | {"final_loss": 9.0, "curve": [[1e8, 8.0], [2e8, 9.0]]},
    ]
    sweep = sweep_from_rows(rows, "runs")
    assert sweep.loss.tolist() == [3.0, 3.1]
    assert [(remark.row, remark.name) for remark in sweep.remarks] == [
        (2, "duplicate"),
        (3, "repeat"),
        (4, "no_loss"),
        (5, "no_loss"),
        (6, "no_loss"),
        (7, "diverged"),
        (8, "not_ok"),
        (9, "diverged"),
    ]
    assert not sweep.remarks[1].is_left_out
    assert all(remark.is_left_out for remark in sweep.remarks if remark.name != "repeat")


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"compute_budget": 1e18, "final_loss": 3.0}, "row 2: parameters is missing"),
        (GOOD | {"parameters": -1}, "row 2: parameters is -1"),
        (GOOD | {"parameters": "many"}, "row 2: parameters is 'many'"),
        (GOOD | {"parameters": True}, "row 2: parameters is True"),
        (GOOD | {"compute_budget": math.nan}, "row 2: compute_budget is nan"),
        (GOOD | {"compute_budget": None}, "row 2: neither compute_budget nor tokens"),
        (GOOD | {"tokens": 0}, "row 2: tokens is 0"),
        (GOOD | {"final_loss": 0}, "row 2: final_loss is 0"),
        ({"parameters": 1e8, "tokens": 1e9, "loss": 3.0}, "row 2: final_loss is missing .*loss"),
        (GOOD | {"curve": [1, 2]}, "row 2: curve must be a list"),
        (GOOD | {"curve": [[2e8, 3.0], [1e8, 2.0]]}, "row 2: curve needs"),
    ],
)
def test_wrong_numbers_name_row_and_field(row: dict[str, object], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        sweep_from_rows([GOOD, row], "runs")


def test_all_formats_give_the_same_sweep(tmp_path: pathlib.Path) -> None:
    rows = [GOOD, GOOD | {"parameters": 2e8, "final_loss": 2.9}]
    (tmp_path / "runs.json").write_text(json.dumps(rows))
    (tmp_path / "runs.jsonl").write_text("\n\n".join(json.dumps(row) for row in rows))
    lines = [",".join(GOOD), *(",".join(str(value) for value in row.values()) for row in rows)]
    (tmp_path / "runs.csv").write_text("\n".join(lines) + "\n")
    sweeps = [read_sweep(tmp_path / f"runs.{suffix}") for suffix in ("json", "jsonl", "csv")]
    for sweep in sweeps:
        np.testing.assert_array_equal(sweep.parameters, [1e8, 2e8])
        np.testing.assert_array_equal(sweep.loss, [3.0, 2.9])


def test_training_records_are_runs(tmp_path: pathlib.Path) -> None:
    model = {"vocab_size": 100, "d_model": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    metrics = {"tokens": {"value": 1e6}, "final_loss": {"value": 4.0}}
    record = {"schema": 1, "kind": "train", "case": model, "metrics": metrics, "outcome": "ok"}
    lines = [record, record | {"outcome": "diverged", "metrics": {"tokens": {"value": 2e6}}}]
    path = tmp_path / "records.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    sweep = read_sweep(path)
    assert sweep.parameters.tolist() == [2 * 800 + 4 * 64 + 3 * 128 + 3 * 8]
    assert sweep.tokens.tolist() == [1e6]
    assert [remark.name for remark in sweep.remarks] == ["diverged"]


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("runs.txt", "", "name it .json"),
        ("runs.json", "{}", "array of runs"),
        ("runs.json", "[1]", "row 1: an object"),
        ("runs.json", "[", "not valid JSON"),
        ("runs.jsonl", "{}\n{", "row 2: not valid JSON"),
        ("runs.json", "[]", "no runs"),
        ("runs.csv", "parameters,tokens,final_loss\n1,2\n", "row 1: the number of cells"),
        ("runs.jsonl", '{"schema": 1}', "row 1: a record needs case"),
        ("runs.jsonl", '{"schema": 1, "case": {}, "metrics": {}}', "row 1: case.vocab_size"),
    ],
)
def test_files_that_are_no_runs(
    tmp_path: pathlib.Path, name: str, text: str, complaint: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=complaint):
        read_sweep(tmp_path / name)


def test_a_missing_file_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UsageError, match=r"none.json: cannot read the runs"):
        read_sweep(tmp_path / "none.json")


@pytest.mark.parametrize("loss", [[3.0, math.nan], [3.0, -1.0], [3.0]], ids=str)
def test_a_sweep_holds_only_runs_that_can_be_fitted(loss: list[float]) -> None:
    with pytest.raises(UsageError, match=r"Sweep\.(loss|parameters)"):
        Sweep.from_arrays(parameters=[1e8, 2e8], compute=[1e18, 1e18], loss=loss)


def test_files_of_several_sweeps(tmp_path: pathlib.Path) -> None:
    runs = [[6e18, 1e8, 1e10, 3.0], [6e18, 2e8, 5e9, 2.9]]
    path = tmp_path / "sweeps.json"
    path.write_text(json.dumps({"tuned": {"runs": runs}, "not": {"runs": [GOOD]}}))
    sweep = read_sweep(str(path), name="tuned")
    assert sweep.tokens.tolist() == [1e10, 5e9]
    assert read_sweep(path, name="not").loss.tolist() == [3.0]
    for name in (None, "other"):
        with pytest.raises(UsageError, match=r"contains the sweeps tuned, not; name one of them"):
            read_sweep(path, name=name)
    (tmp_path / "runs.json").write_text(json.dumps([GOOD]))
    with pytest.raises(UsageError, match=r"contains one sweep without a name"):
        read_sweep(tmp_path / "runs.json", name="tuned")
    (tmp_path / "wrong.json").write_text(json.dumps({"tuned": {"runs": [[1.0, 2.0]]}}))
    with pytest.raises(UsageError, match=r"row 1: an object with the run's fields"):
        read_sweep(tmp_path / "wrong.json")
