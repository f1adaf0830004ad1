"""Tests of ``paceline sweep`` as typed by a user: planned, killed and resumed."""

import json
import pathlib
import random
import subprocess
import sys
import time

import pytest

from paceline.scaling import read_sweep
from paceline.training.run_directory import audit_run
from tests.end_to_end.zipf_text import prepare_text
from tests.processes import call_paceline, paceline, until

_SWEEP = ("sweep", "base.toml", "--target", "8e12", "--json")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Returns a directory with tokens and a config."""
    place = tmp_path_factory.mktemp("sweep")
    prepare_text(place, "base.toml")
    return place


def test_a_dry_run_plans_and_mistakes_are_named(place: pathlib.Path) -> None:
    planned = paceline(place, *_SWEEP, "--dry-run")
    runs = [json.loads(line) for line in planned.stdout.splitlines()]
    assert [run["purpose"] for run in runs[:8]] == ["rate"] * 8
    assert not (place / "sweep").exists()
    blind = call_paceline(place, *_SWEEP, "--set", "evaluation.sequences=0")
    assert blind.returncode == 2
    assert "evaluation.sequences is 0" in blind.stderr


def test_the_models_have_the_keys_of_the_config(place: pathlib.Path) -> None:
    keys = ("model.rope_theta=5e5", "model.norm_epsilon=1e-6", "model.tied_embeddings=true")
    changes = [word for key in keys for word in ("--set", key)]
    planned = call_paceline(place, *_SWEEP, *changes, "--dry-run")
    shapes = [json.loads(line)["shape"] for line in planned.stdout.splitlines()]
    found = {(s["rope_theta"], s["norm_epsilon"], s["tied_embeddings"]) for s in shapes}
    assert found == {(5e5, 1e-6, True)}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_killed_sweep_goes_on_to_rows_that_a_fit_reads(tmp_path: pathlib.Path) -> None:
    # The best models for this text are small: with fewer FLOPs they could not be built, and with
    # less text there are not enough tokens for them.
    place = tmp_path
    prepare_text(place, "base.toml", num_files=400)
    sweep = ("sweep", "base.toml", "--target", "1.6e13", "--json")
    running = subprocess.Popen(
        [sys.executable, "-m", "paceline", *sweep], cwd=place, stdout=subprocess.DEVNULL
    )
    until(lambda: len(list((place / "sweep" / "runs").glob("*/ended.json"))) >= 3, 300)
    time.sleep(random.Random(1).uniform(0, 5))
    running.kill()
    running.wait()
    ended = {path.parent.name for path in (place / "sweep" / "runs").glob("*/ended.json")}
    whole = paceline(place, *sweep, timeout_s=1500)
    assert whole.returncode == 0, whole.stderr
    rows = [json.loads(line) for line in whole.stdout.splitlines()][:-3]
    assert len(rows) >= 16
    assert all(row["outcome"] == "ok" for row in rows)
    for row in rows:
        directory = place / "sweep" / "runs" / row["name"]
        steps, wrong = audit_run(directory)
        assert wrong == []
        assert steps * row["batch_tokens"] == row["tokens"]
        events = (directory / "metrics.jsonl").read_text()
        assert events.count('"name":"finished"') == 1
        num_starts = events.count('"name":"started"')
        assert row["is_resumed"] == (num_starts > 1)
        if row["name"] in ended:
            assert num_starts == 1
    again = paceline(place, *sweep)
    assert again.stdout == whole.stdout
    num_fitted = sum(row["name"].startswith("fit-") for row in rows)
    assert len(read_sweep(place / "sweep" / "runs.jsonl")) == num_fitted >= 9
