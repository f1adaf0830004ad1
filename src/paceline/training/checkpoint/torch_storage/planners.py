"""torch's planners, with JSON instead of pickle for values that are not tensors."""

import io
import json
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import ReadItem, WriteItem, WriteItemType

from paceline.training.checkpoint.errors import CheckpointError


class JsonSavePlanner(DefaultSavePlanner):
    """Plans like torch; writes values as JSON, and rejects by name those that JSON cannot hold."""

    def transform_object(self, write_item: WriteItem, object: Any) -> torch.Tensor | io.BytesIO:
        """Returns a tensor unchanged, and any other value as JSON."""
        if write_item.type is not WriteItemType.BYTE_IO:
            tensor: torch.Tensor = object
            return tensor
        return io.BytesIO(encode_json(object, write_item.index.fqn))


class JsonLoadPlanner(DefaultLoadPlanner):
    """Plans like torch; reads values from JSON."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Stores a value in the state."""
        place: Any = self.original_state_dict
        *parents, last = self.mappings[read_item.dest_index.fqn]
        for key in parents:
            place = place[key]
        place[last] = json.loads(value.getvalue())


def encode_json(value: Any, name: str) -> bytes:
    """Returns a value as JSON; raises unless decoding it gives an equal value.

    Args:
        value: Any value.
        name: Name of the value, for the error.
    """
    try:
        text = json.dumps(value, allow_nan=False)
        is_kept = _same(json.loads(text), value)
    except (TypeError, ValueError, RecursionError):
        is_kept = False
    if not is_kept:
        raise CheckpointError(
            f"{name}: a checkpoint can contain tensors and JSON values, not {_brief(value)}; "
            "convert it before saving"
        )
    return text.encode()


def _same(loaded: Any, value: Any) -> bool:
    if isinstance(value, dict) and isinstance(loaded, dict):
        return loaded.keys() == value.keys() and all(_same(loaded[k], value[k]) for k in value)
    if isinstance(value, list) and isinstance(loaded, list):
        return len(loaded) == len(value) and all(map(_same, loaded, value))
    return type(loaded) is type(value) and bool(loaded == value)


def _brief(value: Any) -> str:
    text = repr(value)
    return f"a {type(value).__name__} ({text[:60]}{'...' if len(text) > 60 else ''})"
