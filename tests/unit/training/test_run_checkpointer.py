"""Tests of what a run takes over from a checkpoint, and that another model is recognized."""

import dataclasses
from types import SimpleNamespace
from typing import Any, Self, cast

import pytest
import torch

from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.state import capture_random_state
from paceline.core.specs import ModelShape
from paceline.data.loader.config import SourceConfig
from paceline.training import run_checkpointer
from paceline.training.config import CheckpointConfig, DataConfig, RunConfig
from paceline.training.run_checkpointer import RunCheckpointer, RunIdentity, identity_of

CPU = torch.device("cpu")
SHAPE = ModelShape(vocab_size=256, d_model=32, d_ff=64, num_layers=2, num_heads=4)
OURS = RunIdentity(shape=SHAPE, data={"position": 3})
THEIRS = RunIdentity(hugging_face={"model_type": "gpt2", "n_layer": 2, "transformers_version": "5"})


def test_only_what_makes_another_model_counts() -> None:
    written_out = dataclasses.replace(SHAPE, head_dim=8, num_kv_heads=4)
    assert not OURS.difference(RunIdentity(shape=written_out))
    newer = {**(THEIRS.hugging_face or {}), "transformers_version": "6"}
    assert not THEIRS.difference(RunIdentity(hugging_face=newer))


def test_what_differs_is_named() -> None:
    wider = RunIdentity(shape=dataclasses.replace(SHAPE, d_ff=96, tied_embeddings=True))
    expected = "d_ff 64 instead of 96, tied_embeddings False instead of True"
    assert OURS.difference(wider) == expected
    deeper = RunIdentity(hugging_face={"model_type": "gpt2", "n_layer": 3})
    assert THEIRS.difference(deeper) == "n_layer 2 instead of 3"
    assert THEIRS.difference(OURS) == "a Hugging Face gpt2 instead of Paceline's own model"


class _Position:
    position: object = None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: object) -> None:
        self.position = state


def _random_states(number: int) -> list[dict[str, Any]]:
    """Returns the random states of ranks, all of which differ."""
    states = []
    for rank in range(number):
        torch.manual_seed(rank)
        states.append({"random": capture_random_state(CPU)})
    torch.manual_seed(99)
    return states


@pytest.mark.parametrize(("rank", "world_size"), [(0, 2), (1, 2), (1, 3)])
def test_a_rank_goes_on_with_its_own_random_numbers(rank: int, world_size: int) -> None:
    """Of another number of ranks, nobody's numbers are continued."""
    checkpointer = cast(Any, SimpleNamespace())
    checkpointer._session = SimpleNamespace(rank=rank, world_size=world_size, device=CPU)
    checkpointer._num_ranks = world_size
    ranks = _random_states(2)
    restored = SimpleNamespace(step=7, identity={"data": {"samples": 3}}, ranks=ranks)
    position = _Position()
    assert RunCheckpointer._take_over(checkpointer, cast(Any, restored), position) == 7
    assert position.position == {"samples": 3}
    drawn = torch.rand(3)
    torch.manual_seed(rank if world_size == len(ranks) else 99)
    assert torch.equal(drawn, torch.rand(3))


def test_a_rollback_forgets_what_is_in_memory() -> None:
    calls: list[str] = []
    checkpointer = cast(Any, RunCheckpointer.__new__(RunCheckpointer))
    checkpointer._checkpointer = SimpleNamespace(wait=lambda: calls.append("wait"))
    checkpointer._memory = SimpleNamespace(forget=lambda: calls.append("forget"))
    checkpointer._restore_from_disk = lambda _: calls.append("restore")
    assert checkpointer.roll_back(None, _Position()) is None
    assert calls == ["wait", "forget", "restore"]


@pytest.mark.parametrize("identity", [b'{"data": {"position": 3}}', b'{"shape": 3}'])
def test_a_checkpoint_without_a_model_is_not_one_of_a_run(identity: bytes) -> None:
    checkpoint = SimpleNamespace(
        manifest=SimpleNamespace(identity=identity), storage=SimpleNamespace(url="run/step-7")
    )
    with pytest.raises(CheckpointError, match="run/step-7: does not record its model"):
        identity_of(cast(Any, checkpoint))


class _Writer:
    """Takes the place of a `Checkpointer`, and tells what is asked of it."""

    def __init__(self, calls: list[object], place: str, **options: object) -> None:
        self._calls, self._place = calls, place
        calls.append((place.rpartition("/")[2], options))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def save(self, step: int, *_: object) -> None:
        self._calls.append(f"save {step}")

    def wait(self) -> None:
        self._calls.append("wait")

    def close(self) -> None:
        self._calls.append("close")


def _checkpointer(
    monkeypatch: pytest.MonkeyPatch, calls: list[object], **checkpoint: Any
) -> RunCheckpointer:
    monkeypatch.setattr(
        run_checkpointer, "Checkpointer", lambda place, **options: _Writer(calls, place, **options)
    )
    monkeypatch.setattr(run_checkpointer, "MemoryTier", lambda *_: SimpleNamespace(notices=["x"]))
    monkeypatch.setattr(run_checkpointer, "_identity", lambda _: OURS)
    monkeypatch.setattr(RunCheckpointer, "_state", lambda *_: ({}, {}, {}))
    config = RunConfig(
        out="run",
        data=DataConfig(sources=(SourceConfig(place="tokens"),)),
        checkpoint=CheckpointConfig(keep_last=3, **checkpoint),
    )
    return RunCheckpointer(config, cast(Any, SimpleNamespace(rank=0, world_size=1)))


def test_a_diverged_state_is_saved_apart_after_what_is_being_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[object] = []
    checkpointer = _checkpointer(monkeypatch, calls, asynchronous=True)
    assert calls == [("checkpoints", {"keep": 3, "asynchronous": True, "group": None})]
    calls.clear()
    train_state = cast(Any, SimpleNamespace(outer=None))
    assert checkpointer.save_diverged(41, train_state, _Position()).endswith("diverged")
    only_one = ("diverged", {"keep": 1, "asynchronous": False, "group": None})
    assert calls == ["wait", only_one, "save 41", "close"]


def test_a_run_ends_when_everything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    checkpointer = _checkpointer(monkeypatch, calls)
    calls.clear()
    checkpointer.finish()
    assert calls == ["wait", "close"]


@pytest.mark.parametrize(("every", "notices"), [(0, []), (5, ["x"])])
def test_host_memory_is_used_if_asked(
    every: int, notices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = _checkpointer(monkeypatch, [], memory_every_steps=every)
    assert checkpointer.take_notices() == notices
    assert checkpointer.take_notices() == []


def test_a_step_is_saved_if_it_is_on_disk() -> None:
    checkpointer = cast(Any, RunCheckpointer.__new__(RunCheckpointer))
    checkpointer._checkpointer = SimpleNamespace(location=SimpleNamespace(steps=lambda: [20, 10]))
    assert [step for step in range(30) if checkpointer.is_saved(step)] == [10, 20]
