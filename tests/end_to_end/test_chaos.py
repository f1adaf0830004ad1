"""Tests that a run survives chaos unchanged: kills, stops and a corrupted checkpoint."""

import json
import pathlib
import sys

import pytest

from tests.processes import paceline

_SMALL = (
    *("--set", "model.num_layers=2", "--set", "model.d_model=32", "--set", "model.num_heads=2"),
    *("--set", "model.d_ff=64", "--set", "data.context_length=32", "--set", "training.steps=400"),
    *("--set", "checkpoint.every_steps=10", "--set", "evaluation.sequences=0"),
)


@pytest.mark.slow
def test_a_run_under_chaos_is_the_run_that_was_never_disturbed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "text.txt").write_text("All this happened, more or less. " * 4_000)
    prepared = paceline(
        tmp_path, "data", "prepare", "text.txt", "--tokenizer", "bytes", "--out", "tokens"
    )
    assert prepared.returncode == 0, prepared.stderr
    (tmp_path / "run.toml").write_text(paceline(tmp_path, "train", "init").stdout)
    train = ("train", "run.toml", "--ranks", "2", *_SMALL)
    undisturbed = paceline(tmp_path, *train, "--set", "out=reference")
    assert undisturbed.returncode == 0, undisturbed.stderr
    result = paceline(
        tmp_path,
        *("lab", "chaos", "--run", "run", "--for", "40s", "--kill-every", "8s", "--every", "10s"),
        *("--stop", "1s", "--corrupt", "--seed", "7", "--reference", "reference", "--json"),
        *("--store", "chaos.jsonl", "--figure", "chaos.png"),
        *("--", sys.executable, "-m", "paceline", *train),
    )
    assert result.returncode == 0, result.stderr
    *faults, whole = [json.loads(line) for line in result.stdout.splitlines() if '"kind"' in line]
    assert {fault["outcome"] for fault in faults} == {"ok"}
    assert len(faults) >= 2
    assert whole["metrics"]["lost"]["value"] == 0
    assert whole["metrics"]["audited_steps"]["value"] == 400
    assert whole["metrics"]["num_orphans"]["value"] == 0
    assert (tmp_path / "chaos.png").stat().st_size > 10_000


def test_a_command_that_does_not_come_back_is_lost(tmp_path: pathlib.Path) -> None:
    """Uses a program that writes steps, but exits when it is restarted after a kill."""
    program = tmp_path / "program.py"
    program.write_text(
        "import pathlib, sys, time\n"
        "path = pathlib.Path('run/metrics.jsonl')\n"
        "path.parent.mkdir(exist_ok=True)\n"
        "if path.exists():\n"
        "    sys.exit(3)\n"
        "with path.open('a') as file:\n"
        "    for step in range(1, 1000):\n"
        '        print(f\'{{"kind":"step","step":{step}}}\', file=file, flush=True)\n'
        "        time.sleep(0.05)\n"
    )
    result = paceline(
        tmp_path,
        *("lab", "chaos", "--run", "run", "--for", "10s", "--kill-every", "1s", "--json"),
        *("--", sys.executable, str(program)),
    )
    assert result.returncode == 1
    fault, whole = [json.loads(line) for line in result.stdout.splitlines()]
    assert fault["outcome"] == "failed"
    assert whole["metrics"]["lost"]["value"] == 1
    assert "exit code was 3" in whole["reason"]
