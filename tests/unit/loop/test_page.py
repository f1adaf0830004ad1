"""Tests of the page of a loop: it shows every stage and loads nothing."""

import pathlib
import shutil

import pytest

from paceline.core.errors import UsageError
from paceline.loop.directory import PAGE
from paceline.loop.page import layout_table, write_loop_page
from paceline.predict.history import accuracy_by_quantity, read_history
from paceline.reports.tables.predictions import coverage_table, outcome_table
from paceline.reports.tables.table import render_markdown
from paceline.training.run_directory import RECORD
from tests.unit.loop.fake_machine import SPEC, make_runner
from tests.unit.loop.fake_runs import BASE, FakeExecutor

RUN = pathlib.Path(__file__).parents[3] / "results" / "training-run"


def test_the_page_shows_every_stage(tmp_path: pathlib.Path) -> None:
    runner = make_runner(tmp_path, FakeExecutor())
    runner.directory.begin(SPEC)
    with pytest.raises(UsageError, match="the loop has not ended"):
        write_loop_page(runner.directory, tmp_path / "history.jsonl")
    outcome = runner.run(SPEC, BASE)
    # A fake run has no steps, so those of a real run are copied.
    for path in RUN.iterdir():
        if path.name != RECORD:
            shutil.copy(path, runner.directory.run)
    write_loop_page(runner.directory, tmp_path / "history.jsonl")
    page = (runner.directory.path / PAGE).read_text(encoding="utf-8")
    for title in (
        *("From 1e+14 FLOPs to a model", "Predicted and measured", "The final run", "The sweep"),
        *("The layout", "Cost of the sweep", "All predictions so far"),
    ):
        assert title in page
    assert page.count("data:image/svg+xml") == 5
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "20 tokens per parameter instead" in page
    layout = runner.directory.layout()
    assert layout is not None
    assert len(layout_table(layout).rows) == len(layout.candidates)
    table = outcome_table(outcome.entries, "run")
    assert table.rows[0][0] == "held-out loss"
    found = accuracy_by_quantity(read_history(tmp_path / "history.jsonl"))
    assert "inside their 90% interval" in render_markdown(coverage_table(found, "all"))
