"""What the two passes of attention take: one bundle each, the same for every backend.

The mask is one number, `diagonal`, as in torch.tril: key j is visible to query i where
j <= i + diagonal; None hides nothing. A query that sees no key has output 0 and the logarithm of
an empty sum, -inf.
"""

import dataclasses

from jaxtyping import Float
from torch import Tensor

Results = tuple[Tensor, Tensor]
"""Output, and the logarithm of each query's sum of exponentials (lse)."""
Gradients = tuple[Tensor, Tensor, Tensor]
"""Gradients of query, key and value."""


@dataclasses.dataclass  # Frozen, making one would take 3 µs longer, in every call.
class ForwardInputs:
    """What forward computes its results from."""

    query: Float[Tensor, "batch heads queries head_dim"]
    key: Float[Tensor, "batch kv_heads keys head_dim"]
    value: Float[Tensor, "batch kv_heads keys head_dim"]
    diagonal: int | None
    scale: float


@dataclasses.dataclass
class BackwardInputs(ForwardInputs):
    """What backward computes gradients from: forward's inputs, its results and their gradients."""

    output: Float[Tensor, "batch heads queries head_dim"]
    lse: Float[Tensor, "batch heads queries"]
    output_gradient: Float[Tensor, "batch heads queries head_dim"]
    lse_gradient: Float[Tensor, "batch heads queries"] | None
