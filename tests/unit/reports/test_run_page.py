"""Tests of a run's page: complete, self-contained, and available while the run is in progress."""

import json
import pathlib
import re

import msgspec
import pytest

from paceline.cli.main import parse
from paceline.core.errors import RecordError, UsageError
from paceline.core.plan import Estimate
from paceline.records import capture_environment
from paceline.reports.fields import without_directories
from paceline.reports.run_page import run_page, write_run_page
from paceline.reports.training_run import read_run
from paceline.training.forecast import Forecast
from paceline.training.metrics import EventRow, MetricsFile, MetricsRow
from tests.unit.training.row_factory import (
    CORRECTED,
    evaluation_row,
    expectation,
    started,
    step_row,
)


def _write(
    directory: pathlib.Path, rows: list[MetricsRow], expected: Forecast | None = None
) -> pathlib.Path:
    directory.mkdir()
    (directory / "config.toml").write_text('out = "<run>"\n', encoding="utf-8")
    (directory / "environment.json").write_bytes(msgspec.json.encode(capture_environment()))
    (directory / "expectation.json").write_bytes(msgspec.json.encode(expected or expectation()))
    metrics = MetricsFile(directory / "metrics.jsonl")
    for row in rows:
        metrics.append(row)
    return directory


def _rows() -> list[MetricsRow]:
    rows: list[MetricsRow] = [started()]
    for step in range(1, 101):
        if step == 51:
            rows.append(started(50))
        rows.append(step_row(step, memory_bytes=2**29, exposed_communication_s=0.02))
        if step % 25 == 0:
            rows.append(evaluation_row(step, sample="once <upon> a time"))
            rows.append(EventRow(step=step, name="saved", message=f"step {step}", time_s=0.3))
    return [*rows, EventRow(step=100, name="finished", message="after step 100")]


def test_a_page_has_everything_and_loads_nothing(tmp_path: pathlib.Path) -> None:
    known = expectation(
        step_time_s=0.4,
        peak_flops_per_s=1e10,
        memory_limit_bytes=2**30,
        final_loss=Estimate(value=4.1, low=4.0, high=4.2),
    )
    directory = _write(tmp_path / "run", _rows(), known)
    write_run_page(directory, tmp_path / "pages" / "run.html")
    page = (tmp_path / "pages" / "run.html").read_text(encoding="utf-8")
    assert "Finished: 100 of 100 steps, resumed 1 time. Loss 4.0950, on held-out text" in page
    assert "2 ktokens/s, 500 ms per step, predicted 400 ms." in page
    assert page.count('<img src="data:image/svg+xml;base64,') == 6
    assert re.findall(r"<h2>(.*?)</h2>", page) == [
        *("Loss", "Speed", "Time by phase", "Memory", "Measured and predicted", "Events", "Config")
    ]
    assert "4.1000 (4.0000 to 4.2000) at the end" in page
    assert "once &lt;upon&gt; a time" in page
    assert "out = &#34;&lt;run&gt;&#34;" in page
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", page)
    # Figures come before tables.
    assert page.index("<img") < page.index("<table")


def test_a_page_has_the_intervals_of_its_predictions(tmp_path: pathlib.Path) -> None:
    known = expectation(step_time_s=0.4, corrected=CORRECTED)
    directory = _write(tmp_path / "run", _rows(), known)
    write_run_page(directory, tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert page.count("450 ms (300 ms to 600 ms)") == 2
    assert "512.00 MiB (256.00 MiB to 1.00 GiB)" in page


def test_the_command_prints_where_the_page_is(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = _write(tmp_path / "run", [started()])
    assert parse(["report", "run", str(directory)]).run() == 0
    assert capsys.readouterr().out == f"{directory}/report.html\n"
    page = tmp_path / "other.html"
    assert parse(["report", "run", str(directory), "--out", str(page), "--json"]).run() == 0
    assert json.loads(capsys.readouterr().out) == {"path": str(page)}
    assert page.exists()


def test_a_run_may_be_going_on_and_have_nothing_but_steps(tmp_path: pathlib.Path) -> None:
    nothing = run_page(read_run(_write(tmp_path / "new", [started()])))
    assert nothing.summary[0] == "No step is done yet."
    assert [chapter.title for chapter in nothing.chapters] == ["Events", "Config"]
    one = run_page(read_run(_write(tmp_path / "one", [started(), step_row(1)])))
    assert one.summary[0].startswith("Not finished: 1 of 100 steps. Loss 4.9900. 2 ktokens/s")
    assert "Memory" not in [chapter.title for chapter in one.chapters]


def test_what_is_no_run_is_said(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UsageError, match=r"not the directory of a run: no config\.toml"):
        read_run(tmp_path)
    directory = _write(tmp_path / "run", [started()])
    (directory / "expectation.json").write_text("[]")
    with pytest.raises(RecordError, match=r"expectation\.json: not a valid file of a run"):
        read_run(directory)


def test_a_page_that_is_shared_does_not_say_where_files_lie() -> None:
    config = 'out = "/home/ada/runs/one"\nplace = "s3://bucket/tokens"\nother = "tokens/a"'
    assert without_directories(config) == (
        'out = "…/one"\nplace = "s3://bucket/tokens"\nother = "tokens/a"'
    )
    text = "failed: /scratch/u1/run/checkpoints: disk full, see https://example.com/a/b (1/2)"
    assert without_directories(text) == (
        "failed: …/checkpoints: disk full, see https://example.com/a/b (1/2)"
    )
