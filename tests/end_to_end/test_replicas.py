"""Tests of a run whose replicas are killed: others keep training, lost ones rejoin and heal."""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.processes import children_of, start_python

pytest.importorskip("torchft")

_COMMAND = (
    *("train", "run.toml", "--ranks", "2", "--set", "model.num_layers=2"),
    *("--set", "model.d_model=32", "--set", "model.num_heads=2", "--set", "model.d_ff=64"),
    *("--set", "data.context_length=32", "--set", "training.steps=600"),
    *("--set", "checkpoint.every_steps=100", "--set", "evaluation.sequences=0"),
    *("--set", "parallel.heartbeat_timeout_s=2"),
)
_ELASTIC = ("--set", "parallel.elastic=replicas")


def _start(place: pathlib.Path, *arguments: str) -> "subprocess.Popen[str]":
    return start_python(place, "paceline", *arguments)


def _paceline(place: pathlib.Path, *arguments: str) -> str:
    process = _start(place, *arguments)
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    return stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    place = tmp_path_factory.mktemp("replicas")
    (place / "corpus").mkdir()
    text = "All this happened, more or less. " * 40
    for number in range(60):
        (place / "corpus" / f"{number}.txt").write_text(f"{number}: {text}")
    _paceline(place, "data", "prepare", "corpus", "--tokenizer", "bytes", "--out", "tokens")
    (place / "run.toml").write_text(_paceline(place, "train", "init"))
    return place


def _rows(out: pathlib.Path) -> list[dict[str, Any]]:
    try:
        lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _losses(out: pathlib.Path) -> list[float]:
    return [row["loss"] for row in _rows(out) if row["kind"] == "step"]


def _num_live(out: pathlib.Path) -> int:
    """Returns the most recently reported number of live replicas."""
    said = [row["message"] for row in _rows(out) if row["kind"] == "event"]
    found = re.findall(r"(\d+) of 2 (?:replicas|from step)", "\n".join(said))
    return int(found[-1]) if found else 0


def _wait(running: "subprocess.Popen[str]", until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not until():
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _listens_on(pid: int) -> set[str]:
    """Returns the addresses that a process listens on, in the kernel's notation."""
    links = set()
    for path in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # Closed in the meantime.
            links.add(str(path.readlink()))
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in pathlib.Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    is_listening = "0A"
    return {
        row[1].partition(":")[0]
        for row in rows
        if row[3] == is_listening and f"socket:[{row[9]}]" in links
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_replicas_come_and_go(place: pathlib.Path) -> None:
    _paceline(place, *_COMMAND, "--set", "out=whole")
    out = place / "elastic"
    running = _start(place, *_COMMAND, *_ELASTIC, "--set", "out=elastic")
    for victim in (0, 1):
        _wait(running, lambda: _num_live(out) == 2)
        done = len(_losses(out))
        _wait(running, lambda done=done: len(_losses(out)) >= done + 10)
        os.kill(children_of(running.pid)[victim], signal.SIGKILL)
        _wait(running, lambda: _num_live(out) == 1)
    stdout, stderr = running.communicate(timeout=240)
    assert running.returncode == 0, stderr
    assert stdout.startswith("finished after step 600, loss ")
    assert stderr.count("and is restarted") == 2
    assert [row["step"] for row in _rows(out) if row["kind"] == "step"] == list(range(1, 601))
    # Sums over one replica and over two round differently.
    assert _losses(out) == pytest.approx(_losses(place / "whole"), rel=1e-5)
    audited = _paceline(place, "data", "audit", "elastic")
    assert audited == "elastic: 600 steps, every sample exactly once\n"


@pytest.mark.slow
def test_replicas_that_are_asked_to_stop_save_and_go_on_from_disk(place: pathlib.Path) -> None:
    out = place / "stopped"
    command = (*_COMMAND, *_ELASTIC, "--set", "out=stopped", "--set", "training.steps=100000")
    running = _start(place, *command)
    _wait(running, lambda: _num_live(out) == 2)
    loopback = "0100007F"
    for pid in (running.pid, *children_of(running.pid)):
        assert _listens_on(pid) == {loopback}
    running.terminate()
    stdout, stderr = running.communicate(timeout=120)
    assert running.returncode == 143, stderr
    step = int(re.findall(r"stopped after step ([\d,]+)", stdout)[0].replace(",", ""))
    assert (out / "checkpoints" / f"step-{step:08d}").is_dir()
    running = _start(place, *command)
    _wait(running, lambda: len(_losses(out)) > step + 5)
    running.terminate()
    running.communicate(timeout=120)
    assert [row["step"] for row in _rows(out) if row["kind"] == "step"][: step + 5] == list(
        range(1, step + 6)
    )
