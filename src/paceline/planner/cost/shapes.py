"""Shapes with array dimensions, one entry per layout, for models of different sizes.

`step_time` accepts them like any shape, so one call predicts runs of many models. Properties that
change the formulas (norm, activation, biases) must be the same in all.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.core.errors import UsageError
from paceline.core.specs import ModelShape

_NUMBERS = ("vocab_size", "d_model", "d_ff", "num_layers", "num_heads", "max_context_length")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShapeArrays(ModelShape):
    """A shape whose dimensions are arrays. All models in it have attention."""

    def __post_init__(self) -> None:
        """Skips the checks of `ModelShape`: each joined shape has passed them."""

    @property
    def has_attention(self) -> bool:
        """Always true: `join_shapes` requires attention."""
        return True


def formula_of(shape: ModelShape) -> tuple[Any, ...]:
    """Returns the properties that must be equal for shapes to be joined."""
    return (shape.feed_forward, shape.norm, shape.positions, shape.biases, shape.tied_embeddings)


def join_shapes(shapes: Sequence[ModelShape]) -> ModelShape:
    """Joins shapes with the same `formula_of` into one shape with an array entry for each."""
    if len({formula_of(shape) for shape in shapes}) != 1 or not all(
        shape.has_attention for shape in shapes
    ):
        raise UsageError("only shapes with the same kind of blocks, attention included, are joined")
    first = shapes[0]
    numbers: dict[str, Any] = {
        name: np.array([getattr(shape, name) for shape in shapes], dtype=np.float64)
        for name in _NUMBERS
    }
    numbers["num_kv_heads"] = np.array([shape.key_value_heads for shape in shapes], dtype=float)
    numbers["head_dim"] = np.array([shape.head_width for shape in shapes], dtype=float)
    return ShapeArrays(
        **numbers,
        feed_forward=first.feed_forward,
        norm=first.norm,
        positions=first.positions,
        biases=first.biases,
        tied_embeddings=first.tied_embeddings,
    )
