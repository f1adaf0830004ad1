"""Models in the Hugging Face format, which transformers and vLLM load.

A directory has config.json, weights in safetensors and the tokenizer. Weights are written one shard
at a time, so that memory does not grow with the model. A directory is written under a temporary
name and renamed when it is complete. Nothing here runs code from a file: pickled weights are not
read.

Between our Transformer and the Llama layout only names change. Like transformers, our rotary
positions rotate the two halves of a head against each other, so no rows are permuted.

`HuggingFaceLM` is any causal language model of transformers with our model's interface: tokens in,
logits out. Its structure is not known here. So there is no activation checkpointing, no compilation
by block, no prediction of memory or step time, and generation runs without a cache.
"""

import json
import pathlib
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.accounting.model_config import CONFIG, model_of_config, read_config_json
from paceline.core.errors import ShapeError, UsageError
from paceline.core.specs import ModelShape, require_buildable
from paceline.core.units import Progress
from paceline.models.transformer import TransformerLM

if TYPE_CHECKING:
    from transformers import PretrainedConfig


TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9
"""The default of transformers 4; transformers 5 has 50 GB."""


def write_model(
    directory: pathlib.Path,
    files: Mapping[str, Mapping[str, Any] | str],
    sizes: Mapping[str, int],
    read: Callable[[Sequence[str]], Mapping[str, Tensor]],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress = lambda done, total: None,
) -> None:
    """Writes a model in the format that transformers loads.

    The directory is created atomically; it must not exist, or be empty. `files` are all other files
    by name, including config.json. `sizes` are the bytes of every tensor by the names that
    transformers uses, and `read` returns tensors by these names. One weight file at a time is in
    memory.
    """
    from safetensors.torch import save_file

    require_room(directory)
    unfinished = directory.with_name(f"{directory.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    for name, content in files.items():
        _write_text(unfinished / name, content)
    shards = _shards(sizes, max_shard_bytes)
    placed: dict[str, str] = {}
    done, total = 0, sum(sizes.values())
    for number, names in enumerate(shards, start=1):
        file = WEIGHTS
        if len(shards) > 1:
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(
            {name: tensor.detach().contiguous() for name, tensor in read(names).items()},
            unfinished / file,
            metadata={"format": "pt"},
        )
        placed |= dict.fromkeys(names, file)
        done += sum(sizes[name] for name in names)
        progress(done, total)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        _write_text(unfinished / INDEX, index)
    unfinished.rename(directory)


def require_room(directory: pathlib.Path) -> None:
    """Raises a `UsageError` unless a directory does not exist or is empty."""
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise UsageError(f"{directory} already exists; name a new directory")


def weight_files(directory: pathlib.Path) -> list[pathlib.Path]:
    """Returns the weight files of a model; empty if it has no safetensors."""
    index = directory / INDEX
    if index.exists():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UsageError(f"{index}: not an index of weights: {error}") from error
        present = {path.name for path in directory.iterdir()}
        if missing := sorted(str(name) for name in names if name not in present):
            raise UsageError(f"{directory}: no file {missing[0][:80]!r}, though {INDEX} names it")
        return [directory / name for name in sorted(names)]
    return [directory / WEIGHTS] if (directory / WEIGHTS).exists() else []


def read_weights(directory: pathlib.Path) -> dict[str, Tensor]:
    """Returns the tensors in a model's directory, by the names that transformers uses."""
    import safetensors
    from safetensors.torch import load_file

    files = weight_files(directory)
    if not files:
        raise UsageError(f"{directory}: no {WEIGHTS} and no {INDEX}; pickled weights are not read")
    weights: dict[str, Tensor] = {}
    for file in files:
        try:
            weights |= load_file(file)
        except safetensors.SafetensorError as error:
            raise UsageError(f"{file}: damaged: {error}; download it again") from error
    return weights


def _shards(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Groups names, in order, by a maximum size; a larger tensor is a group by itself."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _write_text(path: pathlib.Path, content: Mapping[str, Any] | str) -> None:
    text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
    path.write_text(text, encoding="utf-8")


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


_SUPPORTED = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu", None),
}
"""Values of keys that Paceline's own model supports."""


def shape_of_config(config: Mapping[str, Any], where: str = CONFIG) -> ModelShape:
    """Returns the model shape of a Llama config.json; rejects other architectures."""
    if config.get("model_type") != LLAMA:
        raise UsageError(
            f"{where}: model_type {config.get('model_type')!r} is not llama, the one layout that "
            "Paceline's own model has; model.hugging_face in run.toml trains any other"
        )
    shape = model_of_config(config, where).shape
    for name, supported in _SUPPORTED.items():
        if config.get(name) not in supported:
            raise UsageError(f"{where}: {name} {config[name]!r} is not supported")
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name) or {}
        if not isinstance(rope, dict) or rope.get("rope_type", "default") != "default":
            raise UsageError(f"{where}: scaled rotary positions are not supported")
    return shape


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


_PREFIX = "inner."


class HuggingFaceLM(nn.Module):
    """Wraps a model that AutoModelForCausalLM of transformers returned."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @classmethod
    def of_config(cls, config: Mapping[str, Any], where: str = CONFIG) -> "HuggingFaceLM":
        """Builds the model that config.json describes, with random weights in float32."""
        settings = _settings(config, where)
        from transformers import AutoModelForCausalLM

        return cls(AutoModelForCausalLM.from_config(settings, dtype=torch.float32))

    @classmethod
    def of_directory(cls, directory: pathlib.Path) -> "HuggingFaceLM":
        """Builds a model in float32, with the weights in its directory if there are any."""
        config = read_config_json(directory)
        if not weight_files(directory):
            return cls.of_config(config, str(directory / CONFIG))
        settings = _settings(config, str(directory / CONFIG))
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # Otherwise every rank shows one.
        inner = AutoModelForCausalLM.from_pretrained(
            directory,
            config=settings,
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
        )
        return cls(inner)

    @property
    def max_context_length(self) -> int | None:
        """Longest sequence that the model accepts; None if its config does not state it."""
        length: int | None = getattr(self.inner.config, "max_position_embeddings", None)
        return length

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits of the next token at every position."""
        logits: Tensor = self.inner(input_ids=tokens, use_cache=False).logits
        return logits


def hugging_face_layout(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns config.json of a trained model, and the names of its tensors in the files.

    Of tensors that share storage, such as tied embeddings, only the first is in the files.
    """
    with torch.device("meta"):
        inner = HuggingFaceLM.of_config(config).inner
    kept = {name for name, _ in (*inner.named_parameters(), *inner.named_buffers())}
    names = {f"{_PREFIX}{name}": name for name in inner.state_dict() if name in kept}
    return {**config, "architectures": [type(inner).__name__]}, names


def _settings(config: Mapping[str, Any], where: str) -> "PretrainedConfig":
    try:
        from transformers import AutoConfig
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{where}: Hugging Face models need the package transformers; "
            "pip install 'paceline[hf]'"
        ) from error
    if "model_type" not in config:
        raise UsageError(f"{where}: model_type is missing")
    try:
        settings: PretrainedConfig = AutoConfig.for_model(**_without_code(config))
    except ValueError as error:
        raise UsageError(
            f"{where}: transformers knows no model_type {config['model_type']!r}; code that comes "
            "with a model is not run"
        ) from error
    return settings


_NAMES_CODE = re.compile("_*((attn|attention|experts)_implementation.*|auto_map)")


def _without_code(config: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves out the keys, at any depth, that make transformers fetch code from a hub and run it.

    transformers then chooses SDPA, or its own attention for models that have no other.
    """
    return {
        name: _without_code(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if not _NAMES_CODE.fullmatch(str(name))
    }
