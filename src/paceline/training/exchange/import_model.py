"""Imports a Hugging Face Llama model as a run at step 0, with weights only.

Weights are imported as a checkpoint instead of a config key. They can therefore be verified,
listed, exported and generated from like any other, and the run never needs the directory that they
came from.
"""

import dataclasses
import pathlib

import msgspec

from paceline.core.specs import ModelShape
from paceline.data.loader.config import SourceConfig
from paceline.models.hugging_face.files import (
    CONFIG,
    TOKENIZER,
    read_config,
    read_weights,
    require_room,
)
from paceline.models.hugging_face.llama import end_of_text, from_llama, shape_of_config
from paceline.training.checkpoint.checkpointer import Checkpointer
from paceline.training.checkpoint.state.identity import RunIdentity
from paceline.training.checkpoint.state.training import MODEL
from paceline.training.config import DataConfig, ModelConfig, RunConfig
from paceline.training.run_files import CHECKPOINTS

_DEFAULT_CONTEXT = 256


def import_model(directory: pathlib.Path, run: pathlib.Path) -> RunConfig:
    """Creates the directory of a run from a Llama model; returns a config to train it.

    Args:
        directory: Contains config.json, safetensors and, for text data, tokenizer.json.
        run: The directory to create; it must not contain a run.
    """
    require_room(run)
    settings = read_config(directory)
    shape = shape_of_config(settings, str(directory / CONFIG))
    weights = from_llama(read_weights(directory), shape)
    identity = RunIdentity(shape=shape, end_of_document=end_of_text(settings))
    with Checkpointer(run / CHECKPOINTS, asynchronous=False) as checkpointer:
        checkpointer.save(0, {MODEL: weights}, msgspec.to_builtins(identity))
    if (directory / TOKENIZER).exists():
        (run / TOKENIZER).write_bytes((directory / TOKENIZER).read_bytes())
    return _config_to_train(shape, run)


def _config_to_train(shape: ModelShape, run: pathlib.Path) -> RunConfig:
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    dimensions = {
        field.name: getattr(shape, field.name)
        for field in dataclasses.fields(shape)
        if field.name in fields
    }
    return RunConfig(
        out=str(run),
        model=ModelConfig(**dimensions),
        data=DataConfig(
            sources=(SourceConfig(place="tokens"),),
            context_length=min(_DEFAULT_CONTEXT, shape.max_context_length),
        ),
    )
