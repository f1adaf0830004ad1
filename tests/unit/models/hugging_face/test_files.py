"""Tests that a model's directory is written whole or not at all, in files of bounded size."""

import json
import pathlib
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from paceline.accounting.model_config import read_config_json
from paceline.core.errors import UsageError
from paceline.models.hugging_face import read_weights, write_model

WEIGHTS = {f"layer.{number}": torch.full((10,), float(number)) for number in range(5)}
SIZES = {name: tensor.nbytes for name, tensor in WEIGHTS.items()}


def _read(names: Sequence[str]) -> Mapping[str, Tensor]:
    return {name: WEIGHTS[name] for name in names}


def test_weights_are_read_a_shard_at_a_time(tmp_path: pathlib.Path) -> None:
    asked: list[int] = []
    told: list[tuple[int, int]] = []

    def read(names: Sequence[str]) -> Mapping[str, Tensor]:
        asked.append(len(names))
        return _read(names)

    out = tmp_path / "model"
    write_model(
        out, {"config.json": {}}, SIZES, read, max_shard_bytes=100,
        progress=lambda done, total: told.append((done, total)),
    )  # fmt: skip
    assert asked == [2, 2, 1]
    assert told == [(80, 200), (160, 200), (200, 200)]
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        *(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)),
        "model.safetensors.index.json",
    ]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 200}
    assert index["weight_map"]["layer.4"] == "model-00003-of-00003.safetensors"
    weights = read_weights(out)
    assert all(torch.equal(weights[name], tensor) for name, tensor in WEIGHTS.items())
    (out / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UsageError, match=r"no file 'model-00002-of-00003\.safetensors', though"):
        read_weights(out)


def test_nothing_is_overwritten_and_nothing_half_written(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "model"
    out.mkdir()  # An empty directory may be replaced.

    def fail(names: Sequence[str]) -> Mapping[str, Tensor]:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_model(out, {"config.json": {}}, SIZES, fail)
    assert not list(out.iterdir())
    write_model(out, {"config.json": {}}, SIZES, _read)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    with pytest.raises(UsageError, match="already exists"):
        write_model(out, {"config.json": {}}, SIZES, _read)


def test_files_that_are_missing_or_broken_are_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UsageError, match=r"config\.json: no such file"):
        read_config_json(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"config\.json: not JSON"):
        read_config_json(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UsageError, match=r"config\.json: not a JSON object"):
        read_config_json(tmp_path)
    with pytest.raises(UsageError, match="pickled weights are not read"):
        read_weights(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"?" * 20)
    with pytest.raises(UsageError, match=r"model\.safetensors: damaged"):
        read_weights(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(UsageError, match="not an index of weights"):
        read_weights(tmp_path)
