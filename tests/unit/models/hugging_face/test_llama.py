"""Tests that renaming parameters converts our models to those of transformers and back."""

import dataclasses
import pathlib

import pytest
import torch

from paceline.accounting.model_config import read_config_json
from paceline.core.errors import ShapeError, UsageError
from paceline.core.specs import ModelShape
from paceline.models import TransformerLM
from paceline.models.hugging_face import (
    CONFIG,
    end_of_text,
    from_llama,
    llama_config,
    llama_names,
    read_weights,
    shape_of_config,
    write_model,
)

SHAPE = ModelShape(vocab_size=64, d_model=32, d_ff=80, num_layers=2, num_heads=4, num_kv_heads=2)
SHAPES = [
    SHAPE,
    dataclasses.replace(SHAPE, tied_embeddings=True, num_kv_heads=4),
    dataclasses.replace(
        SHAPE, tied_embeddings=True, num_kv_heads=1, head_dim=16, rope_theta=5e5, norm_epsilon=1e-6
    ),
]


def _write(model: TransformerLM, directory: pathlib.Path) -> None:
    state, names = model.state_dict(), llama_names(model.shape, model.state_dict())
    theirs = {name: state[own] for own, name in names.items()}
    write_model(
        directory,
        {CONFIG: llama_config(model.shape, 3)},
        {name: tensor.nbytes for name, tensor in theirs.items()},
        lambda wanted: {name: theirs[name] for name in wanted},
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_a_round_trip_keeps_every_bit(shape: ModelShape, tmp_path: pathlib.Path) -> None:
    model = TransformerLM(shape)
    _write(model, tmp_path / "model")
    config = read_config_json(tmp_path / "model")
    assert end_of_text(config) == 3
    loaded_shape = shape_of_config(config)
    assert loaded_shape == dataclasses.replace(shape, head_dim=shape.head_width)
    again = TransformerLM(loaded_shape)
    again.load_state_dict(from_llama(read_weights(tmp_path / "model"), loaded_shape))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


@pytest.mark.parametrize("shape", SHAPES)
def test_transformers_gives_the_same_logits(shape: ModelShape, tmp_path: pathlib.Path) -> None:
    transformers = pytest.importorskip("transformers", reason="checks against transformers")
    torch.manual_seed(0)
    model = TransformerLM(shape).eval()
    _write(model, tmp_path / "model")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    assert theirs.dtype == torch.float32
    tokens = torch.randint(64, (2, 33))
    with torch.no_grad():
        ours, expected = model(tokens), theirs(tokens).logits
    assert (ours - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("is_tied", [False, True])
def test_what_transformers_saves_is_read(is_tied: bool, tmp_path: pathlib.Path) -> None:
    transformers = pytest.importorskip("transformers", reason="checks against transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=80, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=is_tied,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "model", max_shard_size="30KB")
    assert (tmp_path / "model" / "model.safetensors.index.json").exists()
    shape = shape_of_config(read_config_json(tmp_path / "model"))
    model = TransformerLM(shape).eval()
    model.load_state_dict(from_llama(read_weights(tmp_path / "model"), shape))
    tokens = torch.randint(64, (2, 33))
    with torch.no_grad():
        ours, expected = model(tokens), theirs(tokens).logits
    assert (ours - expected).abs().max() < 1e-5 * expected.abs().max()


def test_parameters_that_do_not_fit_are_named() -> None:
    with pytest.raises(ShapeError, match=r"blocks\.0\.router\.weight"):
        llama_names(SHAPE, ["blocks.0.router.weight"])
    with pytest.raises(ShapeError, match=r"model\.layers\.0\.mlp\.router\.weight"):
        from_llama({"model.layers.0.mlp.router.weight": torch.zeros(1)}, SHAPE)
    state = TransformerLM(SHAPE).state_dict()
    weights = {name: state[own] for own, name in llama_names(SHAPE, state).items()}
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    from_llama(weights, SHAPE)
    message = r"model\.layers\.0\.mlp\.gate_proj\.weight has the shape \(80, 32\).*\(96, 32\)"
    with pytest.raises(ShapeError, match=message):
        from_llama(weights, dataclasses.replace(SHAPE, d_ff=96))
    del weights["model.norm.weight"]
    with pytest.raises(ShapeError, match=r"model\.norm\.weight is missing"):
        from_llama(weights, SHAPE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not llama"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "scaled rotary positions"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "scaled rotary positions"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"hidden_size": None}, "config.json: .* required field `hidden_size`"),
        ({"max_position_embeddings": "long"}, "`int`, got `str` .*max_position_embeddings"),
        ({"rope_parameters": {"rope_theta": "1e6"}}, "rope_theta is '1e6', not a number"),
        ({"rope_scaling": "none"}, "scaled rotary positions are not supported"),
    ],
)
def test_what_cannot_be_read_is_named(change: dict[str, object], message: str) -> None:
    config = llama_config(SHAPE) | change
    config = {name: value for name, value in config.items() if value is not None}
    with pytest.raises(UsageError, match=message):
        shape_of_config(config)
