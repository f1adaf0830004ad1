"""Tests that runs over two linked hosts match a run of one process, under every layout."""

import pathlib
import subprocess
from collections.abc import Sequence

import pytest

from paceline.training.metrics import MetricsFile, StepRow
from paceline.training.toml_config import encode_config
from tests.distributed.small_runs import changed, small_run
from tests.end_to_end.test_communication import BIN, require_lab

PACELINE = str(BIN / "paceline")
STEPS = 10
LAYOUTS = {
    "tensor in a host, replicas": ("tensor=2", "sequence_parallel=true"),
    "tensor over hosts": ("tensor=4",),
    "tensor, pipeline between hosts": ("tensor=2", "pipeline=2"),
    "four stages": ("pipeline=4",),
    "context, ZeRO-3": ("context=2", 'strategy="fsdp"'),
    "replicas of shards": ("replicate=2", 'strategy="fsdp"'),
    "pipeline, context": ("pipeline=2", "context=2"),
}


def _steps(place: pathlib.Path, out: str) -> list[tuple[float, float]]:
    rows = MetricsFile(place / out / "metrics.jsonl").read()
    return [(row.loss, row.gradient_norm) for row in rows if isinstance(row, StepRow)]


def _train(place: pathlib.Path, out: str, axes: Sequence[str], launcher: Sequence[str]) -> None:
    changes = [f"out={place / out}", *(f"parallel.{axis}" for axis in axes)]
    settings = [word for change in changes for word in ("--set", change)]
    command = [*launcher, PACELINE, "train", "run.toml", *settings]
    result = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_layouts_over_two_hosts_train_as_one_process(tmp_path: pathlib.Path) -> None:
    require_lab()
    config = changed(
        small_run(tmp_path),
        "run",
        model={"num_layers": 4, "num_kv_heads": 4},
        training={"steps": STEPS, "batch_size": 8, "micro_batch_size": 2, "clip_norm": 0.5},
        optimizer={"learning_rate": 1e-2, "epsilon": 1e-4},
    )
    (tmp_path / "run.toml").write_text(encode_config(config))
    _train(tmp_path, "alone", (), ())
    expected = _steps(tmp_path, "alone")
    assert len(expected) == STEPS
    lab = [PACELINE, "lab", "run", "--hosts", "2", "--ranks-per-host", "2", "--rate", "2gbit", "--"]
    for number, (name, axes) in enumerate(LAYOUTS.items()):
        out = f"run-{number}"
        _train(tmp_path, out, axes, lab)
        found = _steps(tmp_path, out)
        for step, (own, alone) in enumerate(zip(found, expected, strict=True), start=1):
            assert own == pytest.approx(alone, rel=1e-5), f"{name}, step {step}"
