"""Tests that a killed or stopped rank is named by the others, with stacks, in one message."""

import json
import os
import pathlib
import signal
import subprocess
import time

import pytest

from paceline.training.toml_config import encode_config
from tests.distributed.small_runs import changed, small_run
from tests.processes import process_of_rank, start_python


def _start(place: pathlib.Path, out: str, **watch: object) -> "subprocess.Popen[str]":
    config = changed(
        small_run(place), out, training={"steps": 10**6}, checkpoint={"every_steps": 10**5}
    )
    config = changed(config, out, watch=watch, logging={"every_steps": 1})
    (place / "run.toml").write_text(encode_config(config))
    process = start_python(place, "paceline", "train", "run.toml", "--ranks", "2")
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step 20 "):
            return process
    raise AssertionError(process.communicate())


def _events(place: pathlib.Path, out: str, name: str) -> list[str]:
    lines = (place / out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = map(json.loads, lines)
    return [row["message"] for row in rows if row["kind"] == "event" and row["name"] == name]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_named_by_the_other(tmp_path: pathlib.Path, rank: int) -> None:
    running = _start(tmp_path, "hung", step_timeout_s=4.0)
    os.kill(process_of_rank(running.pid, rank), signal.SIGSTOP)
    _, stderr = running.communicate(timeout=60)
    assert running.returncode == 75, stderr
    expected = f"no step within 4 s: rank {rank} has not answered within 3 s: stopped, or gone"
    assert expected in stderr
    (event,) = _events(tmp_path, "hung", "lost")
    assert event.startswith(expected)
    stacks = (tmp_path / "hung" / "stacks" / f"rank-{1 - rank}.txt").read_text()
    assert "training/loop.py" in stacks


@pytest.mark.slow
def test_a_killed_rank_is_named_by_the_other(tmp_path: pathlib.Path) -> None:
    running = _start(tmp_path, "killed")
    os.kill(process_of_rank(running.pid, 1), signal.SIGKILL)
    _, stderr = running.communicate(timeout=60)
    assert running.returncode == 137
    (event,) = _events(tmp_path, "killed", "lost")
    assert "rank 1 has not answered" in event
    assert "a collective has failed" in stderr


@pytest.mark.slow
def test_a_rank_that_was_stopped_for_a_while_is_named(tmp_path: pathlib.Path) -> None:
    running = _start(tmp_path, "paused")
    os.kill(process_of_rank(running.pid, 1), signal.SIGSTOP)
    time.sleep(5)
    os.kill(process_of_rank(running.pid, 1), signal.SIGCONT)
    time.sleep(5)
    os.killpg(running.pid, signal.SIGTERM)
    running.communicate(timeout=60)
    assert running.returncode == 143
    named = _events(tmp_path, "paused", "straggler")
    assert any("rank 1 was stopped for" in message for message in named), named
    assert not any("rank 0 was stopped for" in message for message in named)
