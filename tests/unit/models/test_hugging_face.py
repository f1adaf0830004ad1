"""Renames alone take our models to transformers and back."""

import dataclasses
import json
import pathlib

import pytest
import torch

from paceline.core.errors import ShapeError, UsageError
from paceline.core.specs import ModelShape
from paceline.models import TransformerLM
from paceline.models.hugging_face import (
    from_hugging_face,
    hugging_face_config,
    load_hugging_face,
    save_hugging_face,
    shape_of_config,
    to_hugging_face,
)

SHAPE = ModelShape(vocab_size=64, d_model=32, d_ff=80, num_layers=2, num_heads=4, num_kv_heads=2)
SHAPES = [SHAPE, dataclasses.replace(SHAPE, tied_embeddings=True, num_kv_heads=4)]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_round_trip_keeps_every_bit(shape: ModelShape, tmp_path: pathlib.Path) -> None:
    model = TransformerLM(shape)
    save_hugging_face(tmp_path / "model", model.state_dict(), shape, '{"a": 1}', end_of_document=3)
    assert (tmp_path / "model" / "tokenizer.json").read_text() == '{"a": 1}'
    loaded_shape, state = load_hugging_face(tmp_path / "model")
    assert loaded_shape == dataclasses.replace(shape, head_dim=shape.head_width)
    again = TransformerLM(loaded_shape)
    again.load_state_dict(state)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


@pytest.mark.parametrize("shape", SHAPES)
def test_transformers_gives_the_same_logits(shape: ModelShape, tmp_path: pathlib.Path) -> None:
    transformers = pytest.importorskip("transformers", reason="checks against transformers")
    torch.manual_seed(0)
    model = TransformerLM(shape).eval()
    save_hugging_face(tmp_path / "model", model.state_dict(), shape)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    tokens = torch.randint(64, (2, 33))
    with torch.no_grad():
        ours, expected = model(tokens), theirs(tokens).logits
    assert (ours - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_model_is_not_overwritten(tmp_path: pathlib.Path) -> None:
    state = TransformerLM(SHAPE).state_dict()
    save_hugging_face(tmp_path, state, SHAPE)
    with pytest.raises(UsageError, match="holds a model already"):
        save_hugging_face(tmp_path, state, SHAPE)


def test_unknown_parameters_are_named() -> None:
    with pytest.raises(ShapeError, match=r"blocks\.0\.router\.weight"):
        to_hugging_face({"blocks.0.router.weight": torch.zeros(1)}, SHAPE)
    with pytest.raises(ShapeError, match=r"model\.layers\.0\.mlp\.router\.weight"):
        from_hugging_face({"model.layers.0.mlp.router.weight": torch.zeros(1)}, SHAPE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not llama"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "scaled rotary positions"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "scaled rotary positions"),
        ({"attention_bias": True}, "attention_bias is not supported"),
        ({"hidden_size": None}, "hidden_size is missing"),
    ],
)
def test_what_cannot_be_read_is_named(change: dict[str, object], message: str) -> None:
    config = hugging_face_config(SHAPE) | change
    config = {name: value for name, value in config.items() if value is not None}
    with pytest.raises(UsageError, match=message):
        shape_of_config(config)


def test_files_that_are_missing_or_broken_are_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UsageError, match=r"config\.json: no such file"):
        load_hugging_face(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"config\.json: not JSON"):
        load_hugging_face(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(hugging_face_config(SHAPE)))
    with pytest.raises(UsageError, match=r"no \*\.safetensors"):
        load_hugging_face(tmp_path)
