"""Tests that the tutorial's commands run as printed, one after the other."""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from paceline.records import RecordStore
from tests.end_to_end.test_communication import require_lab

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_tutorial_from_its_first_command_to_its_last(tmp_path: pathlib.Path) -> None:
    require_lab()
    text = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```console\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    commands = [line.removeprefix("$ ") for line in "".join(blocks).splitlines()]
    search_path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
    for command in commands:
        result = subprocess.run(
            shlex.split(command),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env={**os.environ, "PATH": search_path},
        )
        assert result.returncode == 0, f"{command}\n{result.stderr}"
        assert result.stdout, command
    records = list(RecordStore(tmp_path / "paceline-records.jsonl").read())
    assert {"step", "comm", "ddp"} <= {record.kind for record in records}
    assert all(record.outcome == "ok" for record in records)
    assert (tmp_path / "profile" / "timelines.png").exists()
    assert (tmp_path / "profile" / "trace.json").exists()
    assert list((tmp_path / "figures").glob("*.svg"))
    assert "Measured on" in (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
