"""The model in a record's case: dimensions, number of parameters, key and name."""

from typing import Any

from paceline.accounting import count_parameters
from paceline.core.specs import ModelShape
from paceline.core.units import format_decimal
from paceline.records import CaseValue, Record
from paceline.records.kinds import MODEL_FIELDS

_DIMENSIONS = ("vocab_size", "d_model", "d_ff", "num_layers", "num_heads")
_UNNAMED = "custom"


def shape_of(record: Record) -> ModelShape | None:
    """Returns the dimensions of a case's model; None if the case does not have them."""
    sizes: dict[str, Any] = {
        field: value
        for field in (*_DIMENSIONS, "num_kv_heads", "head_dim")
        if isinstance(value := record.case.get(field), int)
    }
    if not sizes.keys() >= set(_DIMENSIONS):
        return None
    return ModelShape(**sizes, tied_embeddings=record.case.get("tied_embeddings") is True)


def num_parameters(record: Record) -> int:
    """Returns the number of parameters of a case's model; 0 if its dimensions are unknown."""
    shape = shape_of(record)
    return 0 if shape is None else count_parameters(shape).total


def model_key(record: Record) -> tuple[CaseValue, ...]:
    """Returns a key that identifies a model; unnamed shapes differ only in their dimensions."""
    return tuple(record.case.get(field) for field in MODEL_FIELDS)


def model_name(record: Record) -> str:
    """Returns the name of a model, with its number of parameters if it is unnamed."""
    name = str(record.case["model"])
    if name != _UNNAMED:
        return name
    return f"{name} ({format_decimal(num_parameters(record), '').strip()} parameters)"
