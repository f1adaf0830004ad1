"""Loads a model and its tokenizer for generation, from a run or a Hugging Face directory."""

import dataclasses
import pathlib

import torch
from torch import Tensor

from paceline.core.errors import UsageError
from paceline.core.specs import ModelShape
from paceline.data.tokenizer import Tokenizer
from paceline.models import TransformerLM
from paceline.models.hugging_face.adapter import HuggingFaceLM
from paceline.models.hugging_face.files import CONFIG, TOKENIZER, read_config, read_weights
from paceline.models.hugging_face.llama import LLAMA, end_of_text, from_llama, shape_of_config
from paceline.training.exchange.saved_model import open_saved_model


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model and its tokenizer, for text generation."""

    model: TransformerLM | HuggingFaceLM
    """In evaluation mode, on the CPU."""
    tokenizer: Tokenizer
    step: int | None
    """Step of its checkpoint; None for a Hugging Face directory."""


def load_model(where: str, step: int | None = None) -> LoadedModel:
    """Loads a model with its tokenizer.

    Args:
        where: Directory of a run, location of its checkpoints, or directory of a model.
        step: Step of the checkpoint; by default the newest complete one.
    """
    directory = pathlib.Path(where)
    if "://" not in where and (directory / CONFIG).exists():
        if step is not None:
            raise UsageError(f"{where} is a single model without checkpoints; leave --step out")
        return _from_directory(directory)
    saved = open_saved_model(where, step)
    tokenizer = _tokenizer(saved.tokenizer_json, saved.identity.end_of_document, where)
    state = saved.read(saved.tensors)
    if saved.identity.shape is not None:
        model = _transformer(saved.identity.shape, state)
        return LoadedModel(model=model, tokenizer=tokenizer, step=saved.step)
    assert saved.identity.hugging_face is not None
    theirs = HuggingFaceLM.of_config(saved.identity.hugging_face)
    theirs.load_state_dict(state)
    return LoadedModel(model=theirs.eval(), tokenizer=tokenizer, step=saved.step)


def _from_directory(directory: pathlib.Path) -> LoadedModel:
    config = read_config(directory)
    path = directory / TOKENIZER
    json = path.read_text(encoding="utf-8") if path.exists() else None
    tokenizer = _tokenizer(json, end_of_text(config), str(directory))
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


def _tokenizer(json: str | None, end_of_document: int | None, where: str) -> Tokenizer:
    if json is None:
        raise UsageError(
            f"{where}: no {TOKENIZER}, which is needed to tokenize text; copy the tokenizer that "
            "the data was prepared with there"
        )
    return Tokenizer(json, end_of_document, f"{where}: {TOKENIZER}")
