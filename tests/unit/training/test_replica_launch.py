"""Tests that failing replicas restart as long as they train between failures, else stop."""

import pathlib
import sys

import pytest

from paceline.training import replica_launch as launch

FAILURES = 7
SCRIPT = f"""
import pathlib, sys
from paceline.training.replica_launch import note_first_step
starts = pathlib.Path(sys.argv[1])
starts.write_text(starts.read_text() + "x")
if sys.argv[2] == "trains":
    note_first_step()
    note_first_step()
sys.exit(0 if len(starts.read_text()) > {FAILURES} else 9)
"""


@pytest.mark.parametrize(
    ("way", "exit_code", "num_starts"), [("trains", 0, FAILURES + 1), ("never trains", 9, 5)]
)
def test_failures_count_that_no_step_lies_between(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    exit_code: int,
    num_starts: int,
) -> None:
    starts = tmp_path / "starts"
    starts.write_text("")
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-c", SCRIPT, str(starts), way])
    monkeypatch.setattr(launch, "_FIRST_PAUSE_S", 0.001)
    assert launch._Replicas(1, "unused", grace_s=1.0).run() == exit_code
    assert len(starts.read_text()) == num_starts
