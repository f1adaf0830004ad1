"""Inputs of the two passes of attention: one dataclass each, the same for every backend.

The mask is one number, `diagonal`, as in torch.tril. Key j is visible to query i if
j <= i + diagonal; None hides nothing. A query that sees no key has output 0 and a log-sum-exp of
-inf.
"""

import dataclasses

from jaxtyping import Float
from torch import Tensor

Results = tuple[Tensor, Tensor]
"""Output, and the log-sum-exp of each query's scores (lse)."""
Gradients = tuple[Tensor, Tensor, Tensor]
"""Gradients of query, key and value."""


@dataclasses.dataclass  # Not frozen: that would add 3 µs to every call.
class ForwardInputs:
    """Inputs of forward."""

    query: Float[Tensor, "batch heads queries head_dim"]
    key: Float[Tensor, "batch kv_heads keys head_dim"]
    value: Float[Tensor, "batch kv_heads keys head_dim"]
    diagonal: int | None
    scale: float


@dataclasses.dataclass
class BackwardInputs(ForwardInputs):
    """Inputs of backward: forward's inputs, its results and their gradients."""

    output: Float[Tensor, "batch heads queries head_dim"]
    lse: Float[Tensor, "batch heads queries"]
    output_gradient: Float[Tensor, "batch heads queries head_dim"]
    lse_gradient: Float[Tensor, "batch heads queries"] | None
