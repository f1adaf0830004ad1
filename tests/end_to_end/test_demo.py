"""Tests of ``paceline demo`` as typed by a new user."""

import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

from tests.processes import paceline


def test_a_directory_that_is_there_is_not_touched(tmp_path: pathlib.Path) -> None:
    (tmp_path / "demo").mkdir()
    refused = paceline(tmp_path, "demo")
    assert refused.returncode == 2
    assert "demo already exists; name another directory with --out" in refused.stderr


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_from_nothing_to_a_page_in_five_minutes(tmp_path: pathlib.Path) -> None:
    began = time.monotonic()
    environment = os.environ | {"PACELINE_HISTORY": str(tmp_path / "history.jsonl")}
    made = subprocess.run(
        [sys.executable, "-m", "paceline", "demo", "--json"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    assert time.monotonic() - began < 300
    found = json.loads(made.stdout)
    (step,) = found["entries"]
    assert step["predicted"]["value"] == pytest.approx(step["measured"], rel=0.5)
    assert len(found["sample"]) > 50
    page = (tmp_path / "demo" / "demo.html").read_text(encoding="utf-8")
    assert "Histogram of step times, and what was predicted" in page
    # Every command is shown in a form that the reader can type.
    assert made.stderr.count("$ paceline ") == 5
