"""Tests of TOML configs, overrides and the template, and of the naming of unknown keys."""

import pathlib

import pytest

from paceline.core.errors import UsageError
from paceline.data.loader.config import SourceConfig
from paceline.training.config import DataConfig, RunConfig
from paceline.training.toml_config import config_template, decode_config, encode_config, read_config

_SMALLEST = 'out = "run"\n[data]\nsources = [{ place = "tokens" }]\n'
_CONFIG = RunConfig(out="run", data=DataConfig(sources=(SourceConfig(place="tokens"),)))


def test_the_smallest_config_takes_every_default() -> None:
    assert decode_config(_SMALLEST) == _CONFIG


@pytest.mark.parametrize("write", [encode_config, config_template])
def test_what_is_written_is_read_again(write: object) -> None:
    text = write(_CONFIG)  # type: ignore[operator]
    assert decode_config(text) == _CONFIG


def test_the_template_explains_every_key() -> None:
    lines = config_template(_CONFIG).splitlines()
    for number, line in enumerate(lines):
        if line and not line.startswith(("#", "[")):
            assert lines[number - 1].startswith("# "), line
    text = "\n".join(lines)
    assert "# Global batch size: sequences per step, over all ranks.\nbatch_size = 16" in text
    assert "# vocab_size =" in text  # Left to the preset, and shown as such.


def test_changes_are_values_or_words() -> None:
    config = decode_config(
        _SMALLEST, ["training.steps=7", "schedule.warmup_steps=2", "model.preset=bytes-34M"]
    )
    assert config.training.steps == 7
    assert config.model.shape.d_model == 512


def test_a_shape_may_be_changed() -> None:
    config = decode_config(_SMALLEST, ["model.num_layers=2", "model.tied_embeddings=true"])
    assert config.model.shape.num_layers == 2
    assert config.model.shape.tied_embeddings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("training.stpes=1", r"unknown key 'stpes'; did you mean 'steps'\? known: steps,"),
        ("trainning.steps=1", "did you mean 'training'"),
        ("training.steps=many", r"Expected `int`.*\$\.training\.steps"),
        ("training.steps=0", "training.steps 0 must be positive"),
        ("training.clip_norm=-1", "clip_norm -1.0 must not be negative"),
        ("optimizer.beta2=1", "beta2 1.0 must be from 0 to below 1"),
        ("schedule.warmup_steps=201", "warmup_steps 201 is more than training.steps 200"),
        ("schedule.final_fraction=2", "final_fraction 2.0 must be from 0 to 1"),
        ("data.context_length=4096", "4096"),
        ("model.preset=byte-6M", "unknown model 'byte-6M'; did you mean 'bytes-6M'"),
        ("parallel.strategy=zero3", "strategy"),
        ("out.deeper=1", "out is not a section"),
        ("steps", "write it like training.steps=100"),
        ('data.sources=[{ place = "x", wieght = 2 }]', "did you mean 'weight'"),
        ("training={ steps = { a = 1 } }", "steps is a value, not a section"),
    ],
)
def test_what_is_wrong_is_named(change: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        decode_config(_SMALLEST, [change])


def test_a_file_that_is_not_there_says_how_to_make_one(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UsageError, match="paceline train init"):
        read_config(tmp_path / "run.toml")
    (tmp_path / "run.toml").write_text("out = ")
    with pytest.raises(UsageError, match=r"run\.toml: not TOML"):
        read_config(tmp_path / "run.toml")
