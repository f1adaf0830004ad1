"""Tests that a checkpoint of another model is recognized by its differences."""

import dataclasses

from paceline.core.specs import ModelShape
from paceline.training.run_checkpointer import RunIdentity

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
