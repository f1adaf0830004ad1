"""Our Transformer in Hugging Face's Llama layout, and back: renames alone, no value changes.

Our rotary positions turn the two halves of a head, as transformers' do, so that no row has to be
permuted. A directory has config.json, model.safetensors and, where it is known, tokenizer.json:
what transformers and vLLM load. Nothing here runs code from a file.
"""

import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from paceline.core.errors import ShapeError, UsageError
from paceline.core.specs import ModelShape, require_buildable

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"

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


def to_hugging_face(state: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Renames the parameters of a `TransformerLM`; a tied output layer is left out."""
    renamed = {_their_name(name): tensor for name, tensor in state.items()}
    if shape.tied_embeddings:
        renamed.pop("lm_head.weight", None)
    return renamed


def from_hugging_face(state: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Renames the parameters of a Llama model."""
    renamed = {_our_name(name): tensor for name, tensor in state.items()}
    if shape.tied_embeddings:
        renamed["head.weight"] = renamed["embedding.weight"]
    return renamed


def hugging_face_config(shape: ModelShape, end_of_document: int | None = None) -> dict[str, Any]:
    """Returns config.json for a model of a shape."""
    require_buildable(shape)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.d_model,
        "intermediate_size": shape.d_ff,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.key_value_heads,
        "head_dim": shape.head_width,
        "max_position_embeddings": shape.max_context_length,
        "rms_norm_eps": shape.norm_epsilon,
        # The first for transformers 5, the second for what is older.
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "rope_theta": shape.rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": shape.tied_embeddings,
        "bos_token_id": end_of_document,
        "eos_token_id": end_of_document,
        "torch_dtype": "float32",
    }


def shape_of_config(config: Mapping[str, Any], where: str = CONFIG) -> ModelShape:
    """Returns the shape of a model that config.json describes; another architecture is refused."""
    if config.get("model_type") != "llama":
        raise UsageError(
            f"{where}: model_type {config.get('model_type')!r} is not llama, the one layout that "
            "is read"
        )
    rope = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {}
    if {rope.get("rope_type", "default"), scaling.get("rope_type", "default")} != {"default"}:
        raise UsageError(f"{where}: scaled rotary positions are not supported")
    for name in ("attention_bias", "mlp_bias"):
        if config.get(name):
            raise UsageError(f"{where}: {name} is not supported")
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


def save_hugging_face(
    directory: pathlib.Path,
    state: Mapping[str, Tensor],
    shape: ModelShape,
    tokenizer_json: str | None = None,
    end_of_document: int | None = None,
) -> None:
    """Writes a model as transformers loads it, the config last.

    Args:
        directory: Made if it is not there; must not hold a model.
        state: The full parameters of a `TransformerLM`.
        shape: Its shape.
        tokenizer_json: The tokenizer, where it is known.
        end_of_document: The token that ends a text.
    """
    from safetensors.torch import save_file

    if (directory / CONFIG).exists():
        raise UsageError(f"{directory} holds a model already; name another directory")
    directory.mkdir(parents=True, exist_ok=True)
    renamed = to_hugging_face(state, shape)
    save_file(
        {name: tensor.detach().contiguous() for name, tensor in renamed.items()},
        directory / WEIGHTS,
        metadata={"format": "pt"},
    )
    if tokenizer_json is not None:
        (directory / TOKENIZER).write_text(tokenizer_json, encoding="utf-8")
    config = hugging_face_config(shape, end_of_document)
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_hugging_face(directory: pathlib.Path) -> tuple[ModelShape, dict[str, Tensor]]:
    """Reads a Llama model: its shape, and the parameters of a `TransformerLM`."""
    from safetensors.torch import load_file

    path = directory / CONFIG
    try:
        shape = shape_of_config(json.loads(path.read_text(encoding="utf-8")), str(path))
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file; name the directory of a model") from None
    except ValueError as error:
        raise UsageError(f"{path}: not JSON: {error}") from error
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise UsageError(f"{directory}: no *.safetensors; pickled weights are not read")
    state: dict[str, Tensor] = {}
    for file in files:
        state.update(load_file(file))
    return shape, from_hugging_face(state, shape)


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
