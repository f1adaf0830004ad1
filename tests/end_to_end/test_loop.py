"""Tests of ``paceline loop`` as typed by a user: dry runs, real runs, and runs that are killed."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

from paceline.prediction.history import read_history
from paceline.training.audit import audit_run
from tests.end_to_end.zipf_text import prepare_text
from tests.processes import paceline

_LOOP = ("loop", "--budget", "2e13", "--exploration", "1", "--epochs", "8", "--json")
_CLUSTER = ("loop", "--budget", "1e25", "--devices", "16384", "--exploration", "0.02", "--dry-run")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Returns a directory with tokens and a config."""
    place = tmp_path_factory.mktemp("loop")
    prepare_text(place, "run.toml")
    return place


def test_a_cluster_is_planned_on_paper(tmp_path: pathlib.Path) -> None:
    found = paceline(tmp_path, *_CLUSTER, "--price", "2", "--json")
    assert found.returncode == 0, found.stderr
    plan = json.loads(found.stdout)
    assert plan["run"]["goodput"] > 0.5
    assert plan["run"]["cost"] == pytest.approx(2 * plan["run"]["device_hours"])
    assert plan["parameters"]["low"] < plan["parameters"]["value"] < plan["parameters"]["high"]
    assert plan["layout"]["step_time_s"]["low"] < plan["layout"]["step_time_s"]["high"]
    shown = paceline(tmp_path, *_CLUSTER, "--deadline", "24h").stdout
    for words in ("where it comes from", "goodput", "a checkpoint every", "after the deadline"):
        assert words in " ".join(shown.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--budget", "1e25", "--devices", "8"), "--dry-run"),
        (("--budget", "-1"), "it must be positive"),
        (("--budget", "1e12", "--at-once", "0"), "--at-once must be at least 1"),
    ],
)
def test_mistakes_are_named(tmp_path: pathlib.Path, arguments: tuple[str, ...], words: str) -> None:
    refused = paceline(tmp_path, "loop", *arguments)
    assert refused.returncode == 2
    assert words in refused.stderr


def test_a_loop_is_planned_before_it_is_run(place: pathlib.Path) -> None:
    planned = paceline(place, *_LOOP, "--dry-run")
    runs = [json.loads(line) for line in planned.stdout.splitlines()]
    assert runs[-1]["purpose"] == "final"
    assert runs[-1]["flops"] == pytest.approx(2e13, rel=0.05)
    assert not (place / "loop").exists()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_loop_killed_at_random_moments_comes_to_an_end(
    place: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    environment = os.environ | {"PACELINE_HISTORY": str(tmp_path / "history.jsonl")}
    chance = random.Random(1)
    command = [sys.executable, "-m", "paceline", *_LOOP]
    for _ in range(10):
        running = subprocess.Popen(
            command,
            cwd=place,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(chance.uniform(10, 90))
        running.send_signal(signal.SIGKILL)
        running.wait()
    ended = {path: path.stat().st_mtime_ns for path in (place / "loop").glob("**/ended.json")}
    whole = subprocess.run(
        command, cwd=place, env=environment, capture_output=True, text=True, check=False
    )
    assert whole.returncode == 0, whole.stderr
    entries = [json.loads(line) for line in whole.stdout.splitlines()]
    assert [entry["quantity"] for entry in entries] == [
        *("heldout_loss", "step_time_s", "memory_bytes", "duration_s")
    ]
    runs = [path.parent for path in (place / "loop").glob("**/ended.json")]
    assert len(runs) > 16
    for run in runs:
        _steps, wrong = audit_run(run)
        assert wrong == []
        events = (run / "metrics.jsonl").read_text()
        assert events.count('"name":"finished"') == 1
    # Runs that had ended before the last kill were not touched again.
    assert all(path.stat().st_mtime_ns == changed for path, changed in ended.items())
    again = subprocess.run(
        command, cwd=place, env=environment, capture_output=True, text=True, check=False
    )
    assert again.stdout == whole.stdout
    history = read_history(tmp_path / "history.jsonl")
    assert len(history) == len({(entry.run, entry.quantity) for entry in history})
    assert (place / "loop" / "loop.html").stat().st_size > 50_000
    shown = subprocess.run(
        [sys.executable, "-m", "paceline", "plan", "backtest"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "held-out loss" in shown.stdout
