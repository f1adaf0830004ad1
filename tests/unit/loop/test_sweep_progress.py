"""Tests of the progress of runs in other processes, from partly written files."""

import pathlib
import shutil
import sys

import pytest

from paceline.cli.sweep import SweepProgress
from paceline.loop.executors import LocalExecutor, RunTask
from paceline.loop.sweep import progress_text
from paceline.loop.sweep_directory import SweepDirectory
from paceline.training.run_directory import EXPECTATION, METRICS

RUN = pathlib.Path(__file__).parents[3] / "results" / "training-run"


def _task(directory: pathlib.Path) -> RunTask:
    return RunTask(label="fit-01", directory=str(directory), config="run.toml", ranks=1, threads=1)


def test_a_run_stands_where_its_last_step_was(tmp_path: pathlib.Path) -> None:
    assert progress_text(tmp_path) == "starting"
    shutil.copy(RUN / EXPECTATION, tmp_path)
    assert progress_text(tmp_path) == "starting"
    rows = (RUN / METRICS).read_text().splitlines(keepends=True)
    half = [row for row in rows if '"kind":"step"' in row][:50]
    (tmp_path / METRICS).write_text("".join(half) + '{"kind":"step","st')
    assert progress_text(tmp_path).startswith("step 50 of ")
    assert " left" in progress_text(tmp_path)


def test_without_a_terminal_lines_come_now_and_then(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = SweepProgress(SweepDirectory(tmp_path))
    with progress.open():
        progress.wait([_task(tmp_path)])
        assert capsys.readouterr().err == ""
        monkeypatch.setattr("paceline.cli.sweep._PAUSE_S", 0.0)
        progress.wait([_task(tmp_path)])
        assert capsys.readouterr().err == "fit-01: starting\n"


def test_an_executor_tells_what_it_waits_for(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A command that fails at once.
    monkeypatch.setattr(sys, "executable", "/bin/false")
    seen: list[str] = []
    executor = LocalExecutor(1, lambda running: seen.extend(task.label for task in running))
    assert list(executor.run([_task(tmp_path)])) == ["fit-01"]
    assert set(seen) <= {"fit-01"}
