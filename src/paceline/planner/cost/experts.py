"""A mixture of experts: what its layers hold and send beside those of a dense model.

A router sends each token to k of E experts, each a feed-forward layer of width f, beside a shared
one that all tokens go through. A device multiplies with the active parameters, so that the shape
of such a model has the width of what is active as its `d_ff`; states are those of all E experts,
divided over the expert axis. `paceline.planner.cost.communication` has what they send.
"""

import dataclasses
from typing import Any

from paceline.core.errors import UsageError
from paceline.core.specs import ModelShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """What replaces the feed-forward layer of a block."""

    num_experts: int
    experts_per_token: int
    width: int
    """Width of one expert's hidden activations."""
    shared_width: int = 0
    """Width of the expert that every token goes through."""
    num_dense_layers: int = 0
    """Blocks at the beginning that have an ordinary feed-forward layer instead."""
    attention_parameters: int | None = None
    """Weights of one block's attention, where the shape does not say (latent attention)."""

    def __post_init__(self) -> None:
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise UsageError(
                f"Experts.experts_per_token is {self.experts_per_token} of {self.num_experts} "
                "experts; it must be from 1 to all of them"
            )

    def active_width(self, dense_width: int, num_layers: int) -> int:
        """Returns the width of what a token goes through in a block, on average."""
        dense = self.num_dense_layers / num_layers
        active = self.width * self.experts_per_token + self.shared_width
        return round(active * (1 - dense) + dense_width * dense)


def inactive_parameters(experts: Experts, shape: ModelShape) -> Any:
    """Returns the weights of all experts that a token does not meet, all layers together."""
    matrices = 3 if shape.feed_forward == "swiglu" else 2
    idle = experts.num_experts - experts.experts_per_token
    layers = shape.num_layers - experts.num_dense_layers
    return matrices * shape.d_model * experts.width * idle * layers
