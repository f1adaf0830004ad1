"""Models that a user names, for accounting and planning.

A model is named in one of four ways:

    llama3-8B                            a preset (`paceline.core.presets`)
    DIRECTORY or DIRECTORY/config.json   a model of Hugging Face; only its config.json is read
    FILE.toml                            the table [model]: fields of `ModelShape`, a preset that
                                         they change, and [model.experts]
    d_model=4096,num_layers=32,...       fields of `ModelShape`; experts.width=768 of `Experts`
"""

import dataclasses
import json
import pathlib
import tomllib
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from paceline.accounting.model_config import CONFIG, NamedModel, model_of_config, read_json
from paceline.core.errors import PacelineError, UsageError, did_you_mean, unknown_name
from paceline.core.files import read_named
from paceline.core.presets import find_preset, mixture_names, preset_names, preset_spelling
from paceline.core.specs import Experts, ModelShape


def find_model(named: str) -> NamedModel:
    """Returns the model that a preset's name, a path or dimensions name."""
    name = preset_spelling(named)
    if name in (*preset_names(), *mixture_names()):
        return NamedModel(name, *find_preset(name))
    path = pathlib.Path(named)
    if "=" in named and not path.exists():
        return _model_of_dimensions("custom", _parse_dimensions(named), "--model")
    if path.suffix == ".toml":
        return _model_of_toml(path)
    if path.exists() or "/" in named or path.suffix == ".json":
        file = path if path.suffix == ".json" else path / CONFIG
        name = file.resolve().parent.name if file.name == CONFIG else file.stem
        return model_of_config(read_json(file), str(file), name=name)
    known = (*preset_names(), *mixture_names())
    raise UsageError(
        f"unknown model {named!r}; {did_you_mean(named, known)}known: {', '.join(known)}; or name "
        "the directory of a Hugging Face model, a TOML file, or dimensions such as "
        "d_model=4096,num_layers=32,num_heads=32,d_ff=14336,vocab_size=128256"
    )


def _model_of_toml(path: pathlib.Path) -> NamedModel:
    content = read_named(path, "give a TOML file with the table [model]")
    try:
        model = tomllib.loads(content.decode()).get("model")
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not TOML: {error}") from error
    if not isinstance(model, dict):
        raise UsageError(f"{path}: no table [model]; give the model's dimensions there")
    if isinstance(other := model.get("hugging_face"), str):
        return find_model(str(path.parent / other))
    return _model_of_dimensions(path.stem, model, f"{path}: [model]")


def _parse_dimensions(text: str) -> dict[str, Any]:
    """Parses fields such as ``d_model=4096,experts.width=768``."""
    model: dict[str, Any] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, _, value = part.partition("=")
        table, field = model, name
        if name.startswith("experts."):
            table, field = model.setdefault("experts", {}), name.removeprefix("experts.")
        try:
            table[field] = json.loads(value)
        except ValueError:
            table[field] = value
    return model


_OF_THE_TRAINER = ("activation_checkpointing", "compile_blocks", "hugging_face")
"""Keys of [model] in a run.toml that are not dimensions."""


def _model_of_dimensions(name: str, model: Mapping[str, Any], where: str) -> NamedModel:
    fields = {key: value for key, value in model.items() if key not in _OF_THE_TRAINER}
    preset, experts = fields.pop("preset", None), fields.pop("experts", None)
    base: dict[str, Any] = {}
    if preset is not None:
        shape, mixture = find_preset(str(preset))
        base = dataclasses.asdict(shape)
        experts = mixture if experts is None else experts
    try:
        if experts is not None and not isinstance(experts, Experts):
            experts = _convert(experts, Experts)
        if experts is not None and "d_ff" not in fields:
            # The number of layers is checked before the active width is divided by it.
            shape = _convert(base | fields | {"d_ff": experts.width}, ModelShape)
            fields["d_ff"] = experts.active_width(shape.num_layers)
        shape = _convert(base | fields, ModelShape)
    except (msgspec.ValidationError, TypeError) as error:
        raise UsageError(f"{where}: {error}") from error
    except PacelineError as error:
        raise type(error)(f"{where}: {error}") from error
    return NamedModel(name if fields else str(preset), shape, experts)


_Dimensions = TypeVar("_Dimensions", ModelShape, Experts)


def _convert(fields: Any, kind: type[_Dimensions]) -> _Dimensions:
    known = [field.name for field in dataclasses.fields(kind)]
    for field in fields if isinstance(fields, dict) else ():
        if field not in known:
            raise unknown_name("unknown field", field, known)
    return msgspec.convert(fields, kind)
