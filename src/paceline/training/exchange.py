"""Models in and out of checkpoints: export to Hugging Face, import from it, generation.

A single process exports or loads a checkpoint, regardless of the ranks and strategy that saved it.
Memory use of an export is bounded by one file of weights, not by the model.

Weights are imported as a checkpoint at step 0 instead of a config key. They can therefore be
verified, listed, exported and generated from like any other, and the run never needs the directory
that they came from.
"""

import dataclasses
import math
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from paceline.accounting.model_config import CONFIG, read_config_json
from paceline.checkpoint.catalog import Checkpoint, complete_steps, open_checkpoint
from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.dcp import dtype_of
from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.restore import Source
from paceline.checkpoint.state import MODEL
from paceline.checkpoint.storage import open_checkpoints
from paceline.core.errors import UsageError
from paceline.core.specs import ModelShape
from paceline.core.units import Progress
from paceline.data.loader.config import SourceConfig
from paceline.data.storage import open_storage
from paceline.data.tokenizer import Tokenizer
from paceline.models import TransformerLM
from paceline.models.hugging_face import (
    LLAMA,
    MAX_SHARD_BYTES,
    TOKENIZER,
    TOKENIZER_CONFIG,
    HuggingFaceLM,
    end_of_text,
    from_llama,
    hugging_face_layout,
    llama_config,
    llama_names,
    read_weights,
    require_room,
    shape_of_config,
    write_model,
)
from paceline.training.config import DataConfig, ModelConfig, RunConfig, dimensions
from paceline.training.run_checkpointer import RunIdentity, identity_of
from paceline.training.run_directory import CHECKPOINTS


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedModel:
    """The model part of a checkpoint."""

    checkpoint: Checkpoint
    identity: RunIdentity
    tokenizer_json: str | None
    """Tokenizer of the run, if it is next to the checkpoints."""

    @property
    def step(self) -> int:
        """Number of steps that the model was trained for."""
        return self.checkpoint.step

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name, on the meta device: shapes and dtypes without values."""
        return {
            name.removeprefix(f"{MODEL}."): torch.empty(
                entry.shape, dtype=dtype_of(entry.dtype), device="meta"
            )
            for name, entry in self.checkpoint.manifest.tensors.items()
            if name.startswith(f"{MODEL}.")
        }

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Reads whole tensors, regardless of how ranks split them, and verifies every byte."""
        known = self.tensors
        state = {name: torch.empty_like(known[name], device="cpu") for name in names}
        Source(self.checkpoint).load({MODEL: state})
        return state


def open_saved_model(where: str, step: int | None = None) -> SavedModel:
    """Opens the model in a checkpoint, without reading any tensor."""
    if "://" not in where and (pathlib.Path(where) / CHECKPOINTS).is_dir():
        run, location = where, open_checkpoints(pathlib.Path(where) / CHECKPOINTS)
    else:
        run, location = _parent(where), open_checkpoints(where)
    steps = location.steps()
    if step is None:
        step = next(complete_steps(location), None)
    if step is None or step not in steps:
        what = "complete checkpoint" if step is None else f"checkpoint of step {step}"
        raise CheckpointError(
            f"{where}: no {what}; give the directory of a run or the place of its checkpoints; "
            "`paceline checkpoint list` shows what is there"
        )
    checkpoint = open_checkpoint(location, step)
    return SavedModel(
        checkpoint=checkpoint, identity=identity_of(checkpoint), tokenizer_json=_read_tokenizer(run)
    )


def _parent(where: str) -> str:
    if "://" in where:
        return where.rstrip("/").rpartition("/")[0]
    return str(pathlib.Path(where).absolute().parent)


def _read_tokenizer(run: str) -> str | None:
    try:
        return open_storage(run).read(TOKENIZER).decode()
    except FileNotFoundError:
        return None


ExportDType = Literal["float32", "bfloat16", "float16"]


def export_model(
    saved: SavedModel,
    out: pathlib.Path,
    *,
    dtype: ExportDType | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress = lambda done, total: None,
) -> dict[str, Any]:
    """Writes a model that AutoModelForCausalLM and AutoTokenizer load; returns config.json."""
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


_DEFAULT_CONTEXT = 256


def import_model(directory: pathlib.Path, run: pathlib.Path) -> RunConfig:
    """Creates the directory of a run from a Llama model; returns a config to train it."""
    require_room(run)
    settings = read_config_json(directory)
    shape = shape_of_config(settings, str(directory / CONFIG))
    weights = from_llama(read_weights(directory), shape)
    identity = RunIdentity(shape=shape, end_of_document=end_of_text(settings))
    with Checkpointer(run / CHECKPOINTS, asynchronous=False) as checkpointer:
        checkpointer.save(0, {MODEL: weights}, msgspec.to_builtins(identity))
    if (directory / TOKENIZER).exists():
        (run / TOKENIZER).write_bytes((directory / TOKENIZER).read_bytes())
    return _config_to_train(shape, run)


def _config_to_train(shape: ModelShape, run: pathlib.Path) -> RunConfig:
    return RunConfig(
        out=str(run),
        model=ModelConfig(**dimensions(shape)),
        data=DataConfig(
            sources=(SourceConfig(place="tokens"),),
            context_length=min(_DEFAULT_CONTEXT, shape.max_context_length),
        ),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model and its tokenizer, for text generation."""

    model: TransformerLM | HuggingFaceLM
    """In evaluation mode, on the CPU."""
    tokenizer: Tokenizer
    step: int | None
    """Step of its checkpoint; None for a Hugging Face directory."""


def load_model(where: str, step: int | None = None) -> LoadedModel:
    """Loads a model with its tokenizer."""
    directory = pathlib.Path(where)
    if "://" not in where and (directory / CONFIG).exists():
        if step is not None:
            raise UsageError(f"{where} is a single model without checkpoints; leave --step out")
        return _from_directory(directory)
    saved = open_saved_model(where, step)
    tokenizer = _make_tokenizer(saved.tokenizer_json, saved.identity.end_of_document, where)
    state = saved.read(saved.tensors)
    if saved.identity.shape is not None:
        model = _transformer(saved.identity.shape, state)
        return LoadedModel(model=model, tokenizer=tokenizer, step=saved.step)
    assert saved.identity.hugging_face is not None
    theirs = HuggingFaceLM.of_config(saved.identity.hugging_face)
    theirs.load_state_dict(state)
    return LoadedModel(model=theirs.eval(), tokenizer=tokenizer, step=saved.step)


def _from_directory(directory: pathlib.Path) -> LoadedModel:
    config = read_config_json(directory)
    path = directory / TOKENIZER
    json = path.read_text(encoding="utf-8") if path.exists() else None
    tokenizer = _make_tokenizer(json, end_of_text(config), str(directory))
    if config.get("model_type") != LLAMA:
        theirs = HuggingFaceLM.of_directory(directory).eval()
        return LoadedModel(model=theirs, tokenizer=tokenizer, step=None)
    shape = shape_of_config(config, str(directory / CONFIG))
    model = _transformer(shape, from_llama(read_weights(directory), shape))
    return LoadedModel(model=model, tokenizer=tokenizer, step=None)


def _transformer(shape: ModelShape, state: dict[str, Tensor]) -> TransformerLM:
    with torch.device("meta"):
        model = TransformerLM(shape)
    # Assigns the tensors as parameters, without initialization or copies.
    model.load_state_dict(state, assign=True)
    model.positions.to_empty(device="cpu")
    model.positions.reset_buffers()
    return model.eval()


def _make_tokenizer(json: str | None, end_of_document: int | None, where: str) -> Tokenizer:
    if json is None:
        raise UsageError(
            f"{where}: no {TOKENIZER}, which is needed to tokenize text; copy the tokenizer that "
            "the data was prepared with there"
        )
    return Tokenizer(json, end_of_document, f"{where}: {TOKENIZER}")
