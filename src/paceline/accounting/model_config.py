"""Models of Hugging Face from config.json, for accounting and planning, without transformers.

What a type of model adds to the blocks that `ModelShape` describes, in parameters of one block. h
is the width of the residual stream, a that of all query heads, k that of all key heads, d that of
one head, n the number of query heads:

    llama, mistral, mixtral, phi3   nothing
    qwen2                           biases of queries, keys and values: a + 2k
    qwen3, qwen3_moe                norms of the heads of queries and keys: 2d
    gemma2                          two more norms, behind the branches: 2h
    gemma3                          the same, and norms of heads: 2h + 2d
    olmo2                           norms of all queries and of all keys: a + k
    gpt2, gpt_neox, falcon          layer norms, two plain matrices, biases; falcon has one norm in
                                    blocks whose branches are parallel
    deepseek_v2, deepseek_v3        latent attention: queries of rank q (or none), keys and values
                                    of rank c with r rotary channels, norms of q and c
    gpt_oss                         one sink per head: n; biases of attention, experts and router

attention_bias, where a type has it, adds a + 2k + h. Tests compare the parameters of every type
with those of transformers. Sliding windows are counted as full attention, and the layers of
DeepSeek-V3 that predict further tokens are left out, as in transformers; `NamedModel.notes` says
so. Models with other kinds of layers (Mamba, linear attention) are refused.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import msgspec

from paceline.core.errors import PacelineError, UsageError, did_you_mean
from paceline.core.files import read_named
from paceline.core.specs import Experts, ModelShape

CONFIG = "config.json"


class NamedModel(NamedTuple):
    """A model that was named on the command line or in a file."""

    name: str
    shape: ModelShape
    """For a mixture of experts, `d_ff` is the active width, averaged over the blocks."""
    experts: Experts | None = None
    notes: tuple[str, ...] = ()
    """What the model has that is not accounted for."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """The notes as sentences that name the model."""
        return tuple(f"{self.name}: {note}." for note in self.notes)


def read_config_json(directory: pathlib.Path) -> dict[str, Any]:
    """Returns config.json of a model's directory."""
    return read_json(directory / CONFIG)


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Returns a JSON object in a file."""
    content = read_named(path, "name the directory of a Hugging Face model")
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path}: not a JSON object")
    return config


_Size = Annotated[int, msgspec.Meta(ge=1)]


class _Config(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of a config.json that determine sizes, under the names that most types use."""

    vocab_size: _Size
    hidden_size: _Size
    intermediate_size: _Size | None = None
    num_hidden_layers: _Size
    num_attention_heads: _Size
    num_key_value_heads: _Size | None = None
    head_dim: _Size | None = None
    max_position_embeddings: _Size = 2048
    rms_norm_eps: float | None = None
    layer_norm_epsilon: float | None = None
    layer_norm_eps: float | None = None
    rope_theta: float | None = None
    rope_parameters: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    use_sliding_window: bool = True
    # Falcon.
    bias: bool = False
    multi_query: bool = True
    new_decoder_architecture: bool = False
    parallel_attn: bool = True
    num_ln_in_parallel_attn: int | None = None
    # Mixtures of experts.
    num_experts_per_tok: int = 1
    num_local_experts: int = 0
    n_shared_experts: int | None = None
    moe_intermediate_size: int = 0
    first_k_dense_replace: int = 0
    decoder_sparse_step: _Size = 1
    mlp_only_layers: list[int] | None = None
    # Latent attention.
    q_lora_rank: int | None = None
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    num_nextn_predict_layers: int = 0

    @property
    def query_width(self) -> int:
        """Width of all query heads."""
        return self.num_attention_heads * self.head_width

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def key_width(self) -> int:
        """Width of all key heads."""
        return (self.num_key_value_heads or self.num_attention_heads) * self.head_width

    @property
    def attention_biases(self) -> int:
        """Biases of queries, keys, values and the output, if attention has biases."""
        biases = self.query_width + 2 * self.key_width + self.hidden_size
        return biases if self.attention_bias else 0


_Details = tuple[dict[str, Any], Experts | None]
"""Fields of a `ModelShape` that differ from those of Llama, and the experts."""


def _llama(config: _Config) -> _Details:
    width = config.intermediate_size or 0
    biases = 2 * width + config.hidden_size if config.mlp_bias else 0
    return {"further_parameters": config.attention_biases + biases}, None


def _qwen2(config: _Config) -> _Details:
    return {"further_parameters": config.query_width + 2 * config.key_width}, None


def _qwen3(config: _Config) -> _Details:
    return {"further_parameters": 2 * config.head_width + config.attention_biases}, None


def _gemma2(config: _Config) -> _Details:
    return {"norms_per_block": 4, "further_parameters": config.attention_biases}, None


def _gemma3(config: _Config) -> _Details:
    return _qwen3(config)[0] | {"norms_per_block": 4}, None


def _olmo2(config: _Config) -> _Details:
    norms = config.query_width + config.key_width
    return {"further_parameters": norms + config.attention_biases}, None


_PLAIN = {"norm": "layernorm", "feed_forward": "gelu"}


def _gpt2(config: _Config) -> _Details:
    return {**_PLAIN, "positions": "learned", "biases": True}, None


def _gpt_neox(config: _Config) -> _Details:
    if config.attention_bias:
        return {**_PLAIN, "biases": True}, None
    biases = (config.intermediate_size or 0) + config.hidden_size
    return {**_PLAIN, "further_parameters": biases}, None


def _falcon(config: _Config) -> _Details:
    separate = not config.parallel_attn
    if config.new_decoder_architecture and not separate:
        separate = config.num_ln_in_parallel_attn != 1
    return {**_PLAIN, "biases": config.bias, "norms_per_block": 2 if separate else 1}, None


def _mixtral(config: _Config) -> _Details:
    experts = Experts(
        num_experts=config.num_local_experts,
        experts_per_token=config.num_experts_per_tok,
        width=config.intermediate_size or 0,
    )
    return {}, experts


def _qwen3_moe(config: _Config) -> _Details:
    only_dense = config.mlp_only_layers or ()
    num_dense = sum(
        layer in only_dense or (layer + 1) % config.decoder_sparse_step != 0
        for layer in range(config.num_hidden_layers)
    )
    experts = Experts(
        num_experts=config.num_local_experts,
        experts_per_token=config.num_experts_per_tok,
        width=config.moe_intermediate_size,
        num_dense_layers=num_dense,
        dense_width=(config.intermediate_size or 0) if num_dense else 0,
    )
    return _qwen3(config)[0], experts


def _deepseek(config: _Config) -> _Details:
    heads, width = config.num_attention_heads, config.hidden_size
    rank, rotary = config.kv_lora_rank, config.qk_rope_head_dim
    of_scores = config.qk_nope_head_dim + rotary
    queries = width * heads * of_scores
    norms, biases = rank, rank + rotary + width
    if config.q_lora_rank is not None:
        queries = config.q_lora_rank * (width + heads * of_scores)
        norms, biases = norms + config.q_lora_rank, biases + config.q_lora_rank
    keys_and_values = rank * heads * (config.qk_nope_head_dim + config.v_head_dim)
    output = heads * config.v_head_dim * width
    weights = queries + width * (rank + rotary) + keys_and_values + output
    experts = None
    num_dense = min(config.first_k_dense_replace, config.num_hidden_layers)
    if config.num_local_experts and num_dense < config.num_hidden_layers:
        experts = Experts(
            num_experts=config.num_local_experts,
            experts_per_token=config.num_experts_per_tok,
            width=config.moe_intermediate_size,
            shared_width=config.moe_intermediate_size * (config.n_shared_experts or 0),
            num_dense_layers=num_dense,
            dense_width=(config.intermediate_size or 0) if num_dense else 0,
        )
    details = {
        "num_kv_heads": heads,
        # Scores and values have different widths; their mean has the FLOPs of both.
        "head_dim": (of_scores + config.v_head_dim) // 2,
        "attention_weights": weights,
        "further_parameters": norms + (biases if config.attention_bias else 0),
    }
    return details, experts


def _gpt_oss(config: _Config) -> _Details:
    details, experts = _mixtral(config)
    assert experts is not None
    sinks = config.num_attention_heads
    details["further_parameters"] = config.attention_biases + sinks
    return details, dataclasses.replace(experts, biases=True)


_EXPERTS = {"num_experts": "num_local_experts", "n_routed_experts": "num_local_experts"}
"""Names that types and versions of transformers have for the number of experts."""


class _Type(NamedTuple):
    """How the config.json of one type of model is read."""

    details: Callable[[_Config], _Details]
    defaults: Mapping[str, Any] = {}
    """Values of keys that config.json may leave out, where they differ from those of `_Config`."""
    renamed: Mapping[str, str] = {}
    """This type's names of keys."""


_GEMMA3: Mapping[str, Any] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
"""Defaults of transformers, which published configs of Gemma 3 leave out."""
_TYPES: dict[str, _Type] = {
    "llama": _Type(_llama),
    "mistral": _Type(lambda config: ({}, None), {"num_key_value_heads": 8}),
    "qwen2": _Type(_qwen2, {"use_sliding_window": False}),
    "qwen3": _Type(_qwen3, {"use_sliding_window": False, "head_dim": 128}),
    "gemma2": _Type(_gemma2, {"tie_word_embeddings": True, "head_dim": 256}),
    "gemma3_text": _Type(_gemma3, _GEMMA3),
    "phi3": _Type(lambda config: ({}, None)),
    "olmo2": _Type(_olmo2),
    "gpt2": _Type(
        _gpt2,
        {"tie_word_embeddings": True, "max_position_embeddings": 1024},
        {
            "n_embd": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_inner": "intermediate_size",
            "n_positions": "max_position_embeddings",
        },
    ),
    "gpt_neox": _Type(_gpt_neox, {"attention_bias": True}),
    "falcon": _Type(
        _falcon,
        {"tie_word_embeddings": True},
        {
            "ffn_hidden_size": "intermediate_size",
            "num_kv_heads": "num_key_value_heads",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
        },
    ),
    "mixtral": _Type(_mixtral, {"num_key_value_heads": 8}),
    "qwen3_moe": _Type(_qwen3_moe, {"use_sliding_window": False}),
    "deepseek_v2": _Type(_deepseek),
    "deepseek_v3": _Type(_deepseek),
    "gpt_oss": _Type(_gpt_oss, {"attention_bias": True, "head_dim": 64}),
}

_DENSE_TWO_MATRICES = ("gpt2", "gpt_neox", "falcon")


def model_types() -> tuple[str, ...]:
    """Returns the values of model_type that `model_of_config` reads."""
    return tuple(_TYPES)


def model_of_config(config: Mapping[str, Any], where: str, *, name: str = "custom") -> NamedModel:
    """Returns the model that a config.json of Hugging Face describes.

    Args:
        config: The file's content.
        where: Its path, for messages.
        name: The model's name.
    """
    notes = []
    if isinstance(text := config.get("text_config"), dict):
        notes.append("only the language model is counted, without its towers for images or sound")
        config = {"tie_word_embeddings": config.get("tie_word_embeddings", True), **text}
    kind = str(config.get("model_type"))
    if kind not in _TYPES:
        raise UsageError(
            f"{where}: model_type {kind!r} is not accounted for; {did_you_mean(kind, _TYPES)}"
            f"known: {', '.join(_TYPES)}; give the dimensions of a similar model instead"
        )
    read = _read(config, kind, where)
    try:
        details, experts = _TYPES[kind].details(read)
        if experts is not None:
            details["d_ff"] = experts.active_width(read.num_hidden_layers)
        shape = _shape(read, details)
    except PacelineError as error:
        raise type(error)(f"{where}: {error}") from error
    if read.sliding_window is not None and read.use_sliding_window:
        notes.append(
            f"windows of {read.sliding_window:,} tokens are counted as attention to the whole "
            "context"
        )
    if read.num_nextn_predict_layers:
        notes.append("layers that predict further tokens are not counted")
    return NamedModel(name, shape, experts, tuple(notes))


def _read(config: Mapping[str, Any], kind: str, where: str) -> _Config:
    """Returns the keys of a config.json under common names, with the defaults of its type."""
    details = _TYPES[kind]
    names = {**_EXPERTS, **details.renamed}
    given = {names.get(key, key): value for key, value in config.items() if value is not None}
    try:
        read = msgspec.convert({**details.defaults, **given}, _Config)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: {error}") from error
    if kind == "falcon" and not read.new_decoder_architecture:
        heads = 1 if read.multi_query else read.num_attention_heads
        read = msgspec.structs.replace(read, num_key_value_heads=heads)
    if read.intermediate_size is None:
        if kind not in _DENSE_TWO_MATRICES:
            raise UsageError(f"{where}: intermediate_size is missing")
        read = msgspec.structs.replace(read, intermediate_size=4 * read.hidden_size)
    return read


def _shape(config: _Config, details: Mapping[str, Any]) -> ModelShape:
    rope = config.rope_parameters or {}
    theta = rope.get("rope_theta", config.rope_theta)
    if theta is not None and not isinstance(theta, (int, float)):
        raise UsageError(f"rope_parameters.rope_theta is {theta!r}, not a number")
    epsilons = (config.rms_norm_eps, config.layer_norm_epsilon, config.layer_norm_eps)
    fields: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "d_model": config.hidden_size,
        "d_ff": config.intermediate_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_context_length": config.max_position_embeddings,
        "tied_embeddings": config.tie_word_embeddings,
        "rope_theta": 10_000.0 if theta is None else float(theta),
        "norm_epsilon": next((each for each in epsilons if each is not None), 1e-6),
    }
    return ModelShape(**{**fields, **details})
