"""Conversion between our Transformer and Hugging Face's Llama layout: only names change.

Like transformers, our rotary positions rotate the two halves of a head against each other, so no
rows are permuted.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import ShapeError, UsageError
from paceline.core.specs import ModelShape, require_buildable
from paceline.models.hugging_face.files import CONFIG
from paceline.models.transformer import TransformerLM

LLAMA = "llama"
"""The model_type whose layout matches our Transformer."""

_OUTER = {
    "embedding.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_INNER = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
_THEIR_INNER = {theirs: ours for ours, theirs in _INNER.items()}
_THEIR_OUTER = {theirs: ours for ours, theirs in _OUTER.items()}
_DERIVED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
"""Tables in old files that are derived from the config."""


def llama_names(shape: ModelShape, names: Iterable[str]) -> dict[str, str]:
    """Returns Llama's name of every `TransformerLM` parameter except a tied output layer."""
    return {
        name: _their_name(name)
        for name in names
        if not (shape.tied_embeddings and name == "head.weight")
    }


def from_llama(state: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Renames the parameters of a Llama model; raises if they do not fit a `TransformerLM`."""
    renamed = {
        _our_name(name): tensor for name, tensor in state.items() if not _DERIVED.fullmatch(name)
    }
    if shape.tied_embeddings and "embedding.weight" in renamed:
        renamed["head.weight"] = renamed["embedding.weight"]
    with torch.device("meta"):
        expected = TransformerLM(shape).state_dict()
    for name, tensor in expected.items():
        if name not in renamed:
            raise ShapeError(f"{_their_name(name)} is missing from the weights")
        if renamed[name].shape != tensor.shape:
            raise ShapeError(
                f"{_their_name(name)} has the shape {tuple(renamed[name].shape)}; config.json "
                f"asks for {tuple(tensor.shape)}"
            )
    return {name: renamed[name] for name in expected}


def llama_config(shape: ModelShape, end_of_document: int | None = None) -> dict[str, Any]:
    """Returns config.json for a model shape, without the dtype."""
    require_buildable(shape)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": LLAMA,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.d_model,
        "intermediate_size": shape.d_ff,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.key_value_heads,
        "head_dim": shape.head_width,
        "max_position_embeddings": shape.max_context_length,
        "rms_norm_eps": shape.norm_epsilon,
        # rope_parameters is for transformers 5, rope_theta for older versions.
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "rope_theta": shape.rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": shape.tied_embeddings,
        "bos_token_id": end_of_document,
        "eos_token_id": end_of_document,
    }


def shape_of_config(config: Mapping[str, Any], where: str = CONFIG) -> ModelShape:
    """Returns the model shape of a Llama config.json; rejects other architectures."""
    if config.get("model_type") != LLAMA:
        raise UsageError(
            f"{where}: model_type {config.get('model_type')!r} is not llama, the one layout that "
            "Paceline's own model has; model.hugging_face in run.toml trains any other"
        )
    rope = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {}
    if {rope.get("rope_type", "default"), scaling.get("rope_type", "default")} != {"default"}:
        raise UsageError(f"{where}: scaled rotary positions are not supported")
    for name in ("attention_bias", "mlp_bias"):
        if config.get(name):
            raise UsageError(f"{where}: {name} is not supported")
    if config.get("hidden_act", "silu") != "silu":
        raise UsageError(
            f"{where}: hidden_act {config['hidden_act']!r} is not supported, only silu"
        )
    try:
        return ModelShape(
            vocab_size=config["vocab_size"],
            d_model=config["hidden_size"],
            d_ff=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config.get("num_key_value_heads"),
            head_dim=config.get("head_dim"),
            max_context_length=config["max_position_embeddings"],
            norm_epsilon=config.get("rms_norm_eps", 1e-6),
            rope_theta=rope.get("rope_theta", config.get("rope_theta", 10_000.0)),
            tied_embeddings=config.get("tie_word_embeddings", False),
        )
    except KeyError as error:
        raise UsageError(f"{where}: {error.args[0]} is missing") from error


def end_of_text(config: Mapping[str, Any]) -> int | None:
    """Returns the end-of-text token, the first if config.json lists several."""
    found = config.get("eos_token_id")
    if isinstance(found, list):
        return found[0] if found else None
    return found


def _their_name(name: str) -> str:
    if name in _OUTER:
        return _OUTER[name]
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)\.weight", name)
    if match is None or match[2] not in _INNER:
        raise ShapeError(f"{name}: no parameter of a TransformerLM that Llama has a name for")
    return f"model.layers.{match[1]}.{_INNER[match[2]]}.weight"


def _our_name(name: str) -> str:
    if name in _THEIR_OUTER:
        return _THEIR_OUTER[name]
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
    if match is None or match[2] not in _THEIR_INNER:
        raise ShapeError(f"{name}: no parameter of Llama that a TransformerLM has a place for")
    return f"blocks.{match[1]}.{_THEIR_INNER[match[2]]}.weight"
