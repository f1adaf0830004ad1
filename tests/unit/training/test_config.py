"""Tests that contradictions in a config are named before anything is built."""

import dataclasses
import json
import pathlib
import re
from typing import Any

import pytest

from paceline.cli.main import main
from paceline.core.errors import UsageError
from paceline.scaling import SweepDesign, synthetic_sweep
from paceline.training.config import ParallelConfig
from paceline.training.forecast import forecast
from paceline.training.toml_config import decode_config
from tests.unit.scaling.surfaces import SURFACE

RUN = """
out = "run"
[data]
sources = [{ place = "tokens" }]
"""
THEIRS = "model.hugging_face=gpt2"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([THEIRS, "model.d_model=64"], r"model\.d_model changes a preset"),
        (
            [THEIRS, "model.activation_checkpointing=full"],
            r"model\.activation_checkpointing is for",
        ),
        ([THEIRS, "model.compile_blocks=true"], r"model\.compile_blocks is for Paceline"),
        ([THEIRS, "optimizer.name=muon"], r"optimizer\.name muon trains the matrices of"),
        (
            ["evaluation.sample_prompt=So", "evaluation.sequences=0"],
            r"evaluation\.sample_prompt is continued after each evaluation",
        ),
    ],
)
def test_contradictions_are_named(changes: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        decode_config(RUN, changes)


def test_a_hugging_face_model_has_the_forecast_of_our_model_with_its_matrices(
    tmp_path: pathlib.Path,
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"model_type": "gpt2", "vocab_size": 300, "n_embd": 96, "n_layer": 2, "n_head": 4}
        )
    )
    theirs = forecast(decode_config(RUN, [f"model.hugging_face={tmp_path}"]), 2)
    changes = {"vocab_size": 300, "d_model": 96, "d_ff": 256, "num_layers": 2, "num_heads": 4}
    settings = [f"model.{name}={value}" for name, value in changes.items()]
    ours = forecast(decode_config(RUN, [*settings, "model.tied_embeddings=true"]), 2)
    # Learned positions, biases and the shifts of norms are theirs alone.
    extra = 1024 * 96 + 2 * (9 * 96 + 2 * 96) + 96
    assert ours.num_parameters is not None
    assert theirs.num_parameters == pytest.approx(ours.num_parameters + extra)
    assert theirs.flops_per_step == ours.flops_per_step
    assert theirs.memory is not None
    assert ours.memory is not None
    assert theirs.memory.activations == ours.memory.activations
    assert not theirs.corrected


def test_nothing_is_predicted_of_a_model_that_is_not_known(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = decode_config(RUN, [THEIRS])
    with pytest.raises(UsageError, match=r"runs of Paceline's own model only"):
        _ = config.model.shape
    (tmp_path / "run.toml").write_text(RUN)
    dry_run = ["train", str(tmp_path / "run.toml"), "--set", THEIRS, "--dry-run"]
    assert main(dry_run) == 0
    output = capsys.readouterr().out
    assert 'hugging_face = "gpt2"' in output
    assert "memory and time: not predicted for this Hugging Face model" in output
    assert main([*dry_run, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["forecast"] is None


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (2, ["parallel.tensor=2"]),
        (4, ["parallel.replicate=2", "parallel.strategy=fsdp"]),
        (None, ["parallel.elastic=replicas"]),
        (2, ["parallel.strategy=zero2", "parallel.compression=int4"]),
        (4, ["parallel.strategy=fsdp", "parallel.outer.sites=2"]),
    ],
)
def test_a_dry_run_predicts_every_layout(
    ranks: int | None,
    changes: list[str],
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    dry_run = ["train", str(tmp_path / "run.toml"), "--dry-run"]
    dry_run += [] if ranks is None else ["--ranks", str(ranks)]
    dry_run += [part for change in changes for part in ("--set", change)]
    assert main(dry_run) == 0
    assert re.search(r"memory +\S+ \S+ at the peak: parameters", capsys.readouterr().out)
    assert main([*dry_run, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["forecast"]
    predicted = forecast(decode_config(RUN, changes), ranks or 2)
    assert said["memory"] == dataclasses.asdict(predicted.memory)
    assert said["corrected"]["memory_bytes"]["value"] == predicted.memory.total


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        ({"strategy": "fsdp", "compression": "int4"}, "ddp and zero2, and fsdp has none"),
        ({"strategy": "ddp", "compression": "fp16"}, "torch_ddp, and ddp has bf16, int8, int4"),
        ({"strategy": "torch_ddp", "compression": "powersgd"}, "bench ddp"),
        ({"compression": "int4", "tensor": 2}, "leave parallel.tensor and the other axes at 1"),
        ({"compression": "int4", "elastic": "replicas"}, "and parallel.elastic none"),
    ],
)
def test_a_compression_that_cannot_run_is_refused(parallel: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        ParallelConfig(**parallel)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["parallel.outer.sites=0"], "parallel.outer.sites 0 must be 1 or more"),
        (["parallel.outer.every_steps=0"], "parallel.outer: every_steps 0 must be 1 or more"),
        (["parallel.outer.delay_steps=30"], "parallel.outer: delay_steps 30 must be less"),
        (["parallel.outer.sites=2", "parallel.tensor=2"], "leave parallel.tensor and the other"),
        (["parallel.outer.sites=2", "parallel.elastic=replicas"], "and parallel.elastic none"),
        (["parallel.outer.sites=2", "parallel.compression=int4"], "leave parallel.compression"),
        (["parallel.outer.sites=2", "checkpoint.memory_every_steps=5"], "memory_every_steps at 0"),
        (["parallel.outer.site=2"], "unknown key 'site'; did you mean 'sites'?"),
    ],
)
def test_sites_that_cannot_run_are_refused(changes: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        decode_config(RUN, changes)


def test_sites_average_as_the_length_of_the_run_suggests() -> None:
    outer = decode_config(RUN, ["parallel.outer.sites=2"]).parallel.outer
    short, long = outer.settings(2999), outer.settings(3000)
    assert (short.learning_rate, short.momentum) == (1.0, 0.0)
    assert (long.learning_rate, long.momentum) == (0.7, 0.9)
    chosen = dataclasses.replace(outer, learning_rate=0.5, momentum=0.2).settings(3000)
    assert (chosen.learning_rate, chosen.momentum) == (0.5, 0.2)


def test_the_loss_at_the_end_is_predicted_from_smaller_runs(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = synthetic_sweep(SURFACE, SweepDesign(budgets=(1e14, 3e14, 1e15), num_sizes=5))
    columns = zip(sweep.parameters, sweep.tokens, sweep.loss, strict=True)
    rows = [
        {"parameters": size, "tokens": tokens, "final_loss": loss} for size, tokens, loss in columns
    ]
    (tmp_path / "runs.json").write_text(json.dumps(rows))
    (tmp_path / "run.toml").write_text(RUN)
    dry_run = ["train", str(tmp_path / "run.toml"), "--dry-run"]
    dry_run += ["--set", "training.steps=2000", "--runs", str(tmp_path / "runs.json")]
    assert main([*dry_run, "--json"]) == 0
    said = capsys.readouterr()
    predicted = json.loads(said.out)["forecast"]
    truth = float(SURFACE.loss(predicted["num_parameters"], predicted["tokens"]))
    assert predicted["final_loss"]["value"] == pytest.approx(truth, rel=1e-6)
    assert "times the compute of the largest one there" not in said.err
    assert main([*dry_run, "--set", "training.steps=20000"]) == 0
    said = capsys.readouterr()
    assert "times the compute of the largest one there" in said.err
    assert " at the end (" in said.out


def test_runs_with_other_seeds_are_evaluated_on_the_same_text() -> None:
    one, other = (decode_config(RUN, [f"training.seed={seed}"]) for seed in (1, 2))
    assert one.loader("train").seed != other.loader("train").seed
    assert one.loader("heldout") == other.loader("heldout")


def test_the_cache_of_shards_is_set_in_the_config() -> None:
    changes = ["data.cache_directory='/cache'", "data.cache_bytes=1000000"]
    loader = decode_config(RUN, changes).loader()
    assert (loader.cache_directory, loader.cache_bytes) == ("/cache", 1_000_000)
