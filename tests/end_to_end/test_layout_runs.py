"""A run from its first step to its exported model, under every layout and on every device."""

import pathlib

import pytest

from paceline.training.metrics import MetricsFile, StepRow
from paceline.training.toml_config import encode_config
from tests import devices
from tests.distributed.small_runs import changed, small_run
from tests.processes import call_paceline, paceline

LAYOUTS = {
    "replicas": ("replicate=2",),
    "ZeRO-2": ('strategy="zero2"',),
    "ZeRO-3": ('strategy="fsdp"',),
    "FSDP2": ('strategy="torch_fsdp2"',),
    "tensor": ("tensor=2", "sequence_parallel=true"),
    "context": ("context=2",),
    "pipeline": ("pipeline=2",),
}


def _here(place: pathlib.Path, *words: str) -> str:
    """Runs a command that starts no ranks in this process."""
    result = call_paceline(place, *words)
    assert result.returncode == 0, result.stderr
    return result.stdout


def _losses(place: pathlib.Path, out: str) -> list[float]:
    rows = MetricsFile(place / out / "metrics.jsonl").read()
    return [row.loss for row in rows if isinstance(row, StepRow)]


def _train(place: pathlib.Path, out: str, ranks: int, steps: int, axes: tuple[str, ...]) -> None:
    changes = [f"out={out}", f"training.steps={steps}", *(f"parallel.{axis}" for axis in axes)]
    settings = [word for change in changes for word in ("--set", change)]
    result = paceline(place, "train", "run.toml", "--ranks", str(ranks), *settings)
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Returns a directory with tokens, a config, and the run of one process."""
    place = tmp_path_factory.mktemp("layouts")
    config = changed(
        small_run(place),
        "run",
        parallel={"device": devices.of_commands()},
        checkpoint={"every_steps": 2},
        evaluation={"sequences": 4, "every_steps": 2},
    )
    (place / "run.toml").write_text(encode_config(config))
    _train(place, "alone", 1, 4, ())
    return place


# On a CPU, other tests train, resume and export for every change.
@pytest.mark.sampled(int(devices.is_accelerator()))
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_is_trained_resumed_verified_exported_and_spoken_to(
    place: pathlib.Path, name: str
) -> None:
    out = name.lower()
    _train(place, out, 2, 2, LAYOUTS[name])
    _train(place, out, 2, 4, LAYOUTS[name])
    assert _losses(place, out) == pytest.approx(_losses(place, "alone"), rel=1e-5)
    assert "2 checkpoints are intact" in _here(place, "checkpoint", "verify", f"{out}/checkpoints")
    exported = _here(place, "checkpoint", "export", out, "--out", f"{out}-model")
    assert exported == f"{out}-model: step 4 as LlamaForCausalLM, float32\n"
    greedy = ("--prompt", "ab", "--tokens", "8", "--temperature", "0")
    spoken = [_here(place, "generate", model, *greedy) for model in (out, f"{out}-model")]
    assert spoken[0] == spoken[1]
