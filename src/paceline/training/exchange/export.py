"""Exports a checkpoint as a Hugging Face model, which does not need Paceline.

A single process reads it, regardless of the ranks and strategy that saved it. Memory use is bounded
by one file of weights, not by the model.
"""

import math
import pathlib
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from paceline.data.tokenizer import Tokenizer
from paceline.models.hugging_face.adapter import hugging_face_layout
from paceline.models.hugging_face.files import (
    CONFIG,
    MAX_SHARD_BYTES,
    TOKENIZER,
    TOKENIZER_CONFIG,
    Progress,
    write_model,
)
from paceline.models.hugging_face.llama import llama_config, llama_names
from paceline.training.exchange.saved_model import SavedModel

ExportDType = Literal["float32", "bfloat16", "float16"]


def export_model(
    saved: SavedModel,
    out: pathlib.Path,
    *,
    dtype: ExportDType | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress = lambda done, total: None,
) -> dict[str, Any]:
    """Writes a model that AutoModelForCausalLM and AutoTokenizer load; returns config.json.

    Args:
        saved: A model in a checkpoint.
        out: The directory to create.
        dtype: dtype to round the weights to; by default they stay as saved.
        max_shard_bytes: Approximate maximum size of a file of weights.
        progress: Called with the bytes done so far and in total.
    """
    tensors = saved.tensors
    config, names = _layout(saved, tensors)
    chosen = {theirs: _rounded(tensors[ours], dtype) for ours, theirs in names.items()}
    ours = {theirs: name for name, theirs in names.items()}

    def read(wanted: Sequence[str]) -> dict[str, Tensor]:
        values = saved.read([ours[name] for name in wanted])
        return {name: _rounded(values.pop(ours[name]), dtype) for name in wanted}

    name_of_dtype = str(next(iter(chosen.values())).dtype).removeprefix("torch.")
    # `dtype` is for transformers 5, `torch_dtype` for older versions.
    config |= {"dtype": name_of_dtype, "torch_dtype": name_of_dtype}
    files: dict[str, dict[str, Any] | str] = {CONFIG: config}
    if saved.tokenizer_json is not None:
        files[TOKENIZER] = saved.tokenizer_json
        files[TOKENIZER_CONFIG] = _tokenizer_config(saved)
    sizes = {name: math.prod(each.shape) * each.itemsize for name, each in chosen.items()}
    write_model(out, files, sizes, read, max_shard_bytes=max_shard_bytes, progress=progress)
    return config


def _layout(saved: SavedModel, tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns config.json, and the exported names of the checkpoint's tensors."""
    shape, end = saved.identity.shape, saved.identity.end_of_document
    if shape is not None:
        return llama_config(shape, end), llama_names(shape, tensors)
    assert saved.identity.hugging_face is not None
    config, names = hugging_face_layout(saved.identity.hugging_face)
    return config | {"eos_token_id": end}, names


def _rounded(tensor: Tensor, dtype: ExportDType | None) -> Tensor:
    if dtype is None or not tensor.is_floating_point():
        return tensor
    rounded: torch.dtype = getattr(torch, dtype)
    return tensor.to(rounded)


def _tokenizer_config(saved: SavedModel) -> dict[str, Any]:
    """Returns the settings that AutoTokenizer needs in addition to tokenizer.json."""
    assert saved.tokenizer_json is not None
    end = saved.identity.end_of_document
    tokenizer = Tokenizer(saved.tokenizer_json, end)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.end_token,
        "eos_token": tokenizer.end_token,
        "clean_up_tokenization_spaces": False,
    }
