"""Tests that checkpoints restore exactly; values other than tensors are JSON, never pickles."""

import functools
import json
import os
import pathlib
import random
import shutil
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

from paceline.checkpoint.catalog import list_checkpoints, verify_checkpoint
from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.dcp_writer import PendingSave
from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.restore import Source, load_newest_valid, load_step
from paceline.checkpoint.state import (
    capture_random_state,
    load_training_state,
    restore_random_state,
)
from paceline.checkpoint.storage import DirectoryStorage, open_checkpoints
from tests.unit.checkpoint.runs import SmallRun, equal, save_steps
from tests.unit.data.s3_server import s3_server


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as bucket:
        yield bucket


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> str:
    if request.param == "local":
        return str(tmp_path / "checkpoints")
    return f"{request.getfixturevalue('s3')}/{os.urandom(4).hex()}"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_newest_comes_back_to_the_bit(place: str, asynchronous: bool) -> None:
    saved = save_steps(place, [1, 2, 3], keep=2, asynchronous=asynchronous)
    other = SmallRun(seed=9)
    restored = other.load(place)
    assert restored is not None
    assert (restored.step, restored.identity, restored.ranks) == (
        3,
        {"step": 3, "seed": 0},
        [{"rank": 0}],
    )
    assert equal(other.numbers(), saved[3])
    assert [summary.step for summary in list_checkpoints(place)] == [2, 3]
    assert not [finding for step in (2, 3) for finding in verify_checkpoint(place, step)]


def test_an_empty_place_has_nothing_to_load(place: str) -> None:
    assert SmallRun().load(place) is None
    assert list_checkpoints(place) == []


def test_a_step_is_never_written_again(place: str) -> None:
    save_steps(place, [1])
    with pytest.raises(CheckpointError, match=r"step-00000001 already exists"):
        save_steps(place, [1])
    assert not list(verify_checkpoint(place, 1))


def test_two_runs_that_publish_the_same_step(place: str) -> None:
    opened = open_checkpoints(place)
    opened.begin(7, "one")
    opened.begin(7, "two")
    for save_id in ("one", "two"):
        opened.write(7, save_id, "rank-00000-00000.safetensors", [b"abc"])
    opened.publish(7, "one", b"{}")
    with pytest.raises(CheckpointError, match="step-00000007"):
        opened.publish(7, "two", b"{ }")
    opened.abandon(7, "two")
    assert opened.storage(7).read("manifest.json") == b"{}"
    assert len(opened.storage(7).sizes()) == 2


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64),
]


def _tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        str(dtype): torch.randint(0, 2, (3, 5), generator=generator).to(dtype) for dtype in DTYPES
    }
    whole = torch.randn(6, 8, generator=generator)
    return {
        **tensors,
        "scalar": torch.tensor(float(seed)),
        "empty": torch.zeros(0, 3),
        "turned": whole.T,
        "stepped": whole[:, ::2],
        "four": torch.randn(2, 3, 4, 5, generator=generator),
    }


def test_all_dtypes_and_shapes_in_small_files_and_blocks(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_small_blocks = functools.partial(PendingSave, block_bytes=16)
    monkeypatch.setattr("paceline.checkpoint.checkpointer.PendingSave", in_small_blocks)
    with Checkpointer(tmp_path, asynchronous=False, max_file_bytes=300) as checkpointer:
        checkpointer.save(0, {"tensors": _tensors(1)}, None)
    files = sorted((tmp_path / "step-00000000").glob("*.safetensors"))
    assert len(files) > 3
    loaded = {"tensors": {name: torch.zeros_like(one) for name, one in _tensors(1).items()}}
    load_step(tmp_path, 0, lambda source: source.load(loaded))
    for name, expected in _tensors(1).items():
        assert loaded["tensors"][name].dtype == expected.dtype
        assert torch.equal(loaded["tensors"][name], expected), name


def test_any_reader_of_safetensors_opens_the_files(tmp_path: pathlib.Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    with Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        checkpointer.save(0, {"tensors": _tensors(1)}, None)
    loaded = safetensors.load_file(tmp_path / "step-00000000" / "rank-00000-00000.safetensors")
    for name, expected in _tensors(1).items():
        assert torch.equal(loaded[f"tensors.{name}"], expected), name


def test_values_are_json_and_nothing_is_a_pickle(tmp_path: pathlib.Path) -> None:
    values = {"lr": 0.1, "names": ["a", "ü"], "none": None, "deep": {"n": 2**70}}
    with Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        checkpointer.save(4, {"values": values}, {"config": values})
    loaded = {"values": {"lr": 0, "names": ["", ""], "none": 0, "deep": {"n": 0}}}
    restored = load_newest_valid(tmp_path, lambda source: source.load(loaded))
    assert restored is not None
    assert restored.identity == {"config": values}
    assert loaded["values"] == values
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    json.loads(file.read_text())


@pytest.mark.parametrize("value", [(1, 2), {1: 2}, object(), 1j, b"bytes", {1, 2}, float("inf")])
def test_what_json_cannot_hold_is_refused_by_name(tmp_path: pathlib.Path, value: object) -> None:
    with Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        with pytest.raises(
            CheckpointError, match="the run's identity: a checkpoint can contain tensors"
        ):
            checkpointer.save(0, {}, {"x": value})
        if not isinstance(value, (tuple, dict)):  # torch flattens these.
            with pytest.raises(
                CheckpointError, match=r"deep\.x: a checkpoint can contain tensors and"
            ):
                checkpointer.save(0, {"deep": {"x": value}}, None)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_dtype_that_safetensors_has_not_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    with (
        Checkpointer(tmp_path, asynchronous=False) as checkpointer,
        pytest.raises(
            CheckpointError, match=r"phase: safetensors does not support torch.complex128"
        ),
    ):
        checkpointer.save(0, {"phase": torch.zeros(2, dtype=torch.complex128)}, None)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_of_another_model_is_named_and_not_passed_over(tmp_path: pathlib.Path) -> None:
    save_steps(tmp_path, [1, 2])
    wide = SmallRun()
    wide.model[0] = torch.nn.Linear(5, 8)
    with pytest.raises(CheckpointError, match=r"step-00000002.*model\.0\.weight.*another model"):
        wide.load(tmp_path)
    with pytest.raises(CheckpointError, match=r"Missing key.*model\.extra"):
        load_step(tmp_path, 1, lambda source: source.load({"model": {"extra": torch.zeros(1)}}))
    assert [summary.step for summary in list_checkpoints(tmp_path)] == [1, 2]


def test_a_state_may_change_while_it_is_written(tmp_path: pathlib.Path) -> None:
    tensor = torch.full((300_000,), 1.0)
    with Checkpointer(tmp_path) as checkpointer:
        for step in range(3):
            tensor.fill_(step)
            checkpointer.save(step, {"x": tensor}, None)
            tensor.fill_(-1.0)
    for step in range(3):
        loaded = {"x": torch.empty_like(tensor)}
        load_step(tmp_path, step, lambda source, to=loaded: source.load(to))
        assert bool((loaded["x"] == step).all())


def test_a_part_of_a_state_is_enough(tmp_path: pathlib.Path) -> None:
    saved = save_steps(tmp_path, [1])
    weight = {"model": {"0.weight": torch.zeros(7, 5)}}

    def load(source: Source) -> None:
        source.load(weight)

    load_step(tmp_path, 1, load)
    assert torch.equal(weight["model"]["0.weight"], saved[1][0])


def test_random_numbers_go_on_where_they_were(tmp_path: pathlib.Path) -> None:
    def draw() -> list[object]:
        return [torch.rand(3).tolist(), random.gauss(0, 1), np.random.standard_normal(3).tolist()]

    draw()
    state = json.loads(json.dumps(capture_random_state(torch.device("cpu"))))
    expected = draw()
    assert draw() != expected
    restore_random_state(state, torch.device("cpu"))
    assert draw() == expected


def test_a_checkpoint_of_version_0_2_still_loads(tmp_path: pathlib.Path) -> None:
    saved = pathlib.Path(__file__).parent / "saved"
    place = shutil.copytree(saved, tmp_path / "checkpoints")
    assert list(verify_checkpoint(place, 3)) == []
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    restored = load_newest_valid(
        place, lambda source: load_training_state(source, model, {"main": optimizer})
    )
    assert restored is not None
    assert (restored.step, restored.identity) == (3, {"data": {"consumed_samples": 12}})
    assert restored.ranks == [{"random": 1}]
    assert model.weight.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert model.bias.tolist() == [-1.0, 0.5]
    state = optimizer.state[model.weight]
    assert float(state["step"]) == 1.0
    assert torch.allclose(state["exp_avg"], torch.full((2, 3), 0.1))
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("seen", [0.0, 0.5])
def test_files_that_the_first_rank_does_not_see_whole_are_not_published(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, seen: float
) -> None:
    """A directory that each host has for itself, such as /tmp, is no place for checkpoints."""
    sizes = DirectoryStorage.sizes
    monkeypatch.setattr(
        DirectoryStorage,
        "sizes",
        lambda *arguments: {
            name: int(size * seen) for name, size in sizes(*arguments).items() if seen
        },
    )
    message = r"first rank cannot see rank-00000-00000\.safetensors, written by rank 0; name a dir"
    with pytest.raises(CheckpointError, match=message):
        save_steps(tmp_path, [1])
    assert list_checkpoints(tmp_path) == []
