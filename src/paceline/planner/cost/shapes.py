"""Models of different sizes at once: the dimensions of a shape as arrays, one entry per layout.

`step_time` takes them like any shape, so that runs of many models are predicted by one call.
What changes formulas and not numbers (norm, activation, biases) must be the same in all.
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
    """Shapes whose dimensions are arrays; all of them have attention."""

    def __post_init__(self) -> None:
        """Leaves out a shape's checks: each of these shapes has passed them."""

    @property
    def has_attention(self) -> bool:
        """Whether blocks have attention, which is required of all."""
        return True


def formula_of(shape: ModelShape) -> tuple[Any, ...]:
    """Returns what two shapes must have in common to be joined."""
    return (shape.feed_forward, shape.norm, shape.positions, shape.biases, shape.tied_embeddings)


def join_shapes(shapes: Sequence[ModelShape]) -> ModelShape:
    """Joins shapes of one formula, one entry for each."""
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
