"""torch's planners, with JSON in place of pickle for what is no tensor."""

import io
import json
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import ReadItem, WriteItem, WriteItemType

from paceline.training.checkpoint.errors import CheckpointError


class JsonSavePlanner(DefaultSavePlanner):
    """Plans as torch does; values are written as JSON, and refused by name if they cannot be."""

    def transform_object(self, write_item: WriteItem, object: Any) -> torch.Tensor | io.BytesIO:
        """Returns a tensor as it is, and any other value as its JSON."""
        if write_item.type is not WriteItemType.BYTE_IO:
            tensor: torch.Tensor = object
            return tensor
        return io.BytesIO(encode_json(object, write_item.index.fqn))


class JsonLoadPlanner(DefaultLoadPlanner):
    """Plans as torch does; values are read from JSON."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Puts a value in its place in the state."""
        place: Any = self.original_state_dict
        *parents, last = self.mappings[read_item.dest_index.fqn]
        for key in parents:
            place = place[key]
        place[last] = json.loads(value.getvalue())


def encode_json(value: Any, name: str) -> bytes:
    """Returns a value as JSON from which it comes back equal.

    Args:
        value: Anything.
        name: What it is called, for the error.
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
