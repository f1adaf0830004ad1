"""Tests of what a run takes over from a checkpoint, and that another model is recognized."""

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from paceline.checkpoint.state import capture_random_state
from paceline.core.specs import ModelShape
from paceline.training.run_checkpointer import RunCheckpointer, RunIdentity

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
        states.append({"random": capture_random_state()})
    torch.manual_seed(99)
    return states


@pytest.mark.parametrize(("rank", "world_size"), [(0, 2), (1, 2), (1, 3)])
def test_a_rank_goes_on_with_its_own_random_numbers(rank: int, world_size: int) -> None:
    """Of another number of ranks, nobody's numbers are continued."""
    checkpointer = cast(Any, SimpleNamespace())
    checkpointer._session = SimpleNamespace(rank=rank, world_size=world_size)
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
