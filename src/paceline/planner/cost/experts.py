"""A mixture of experts: what its layers compute, hold and send beside those of a dense model.

A router sends each token to k of E experts, each a feed-forward layer of width f, beside a shared
one that all tokens go through. Matmuls are those of the active parameters; states are those of all
of them, divided over the expert axis.
"""

import dataclasses

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

    def layer_parameters(self, shape: ModelShape) -> float:
        """Returns the expert weights of a block, averaged over all blocks of the model."""
        matrices = 3 if shape.feed_forward == "swiglu" else 2
        share = 1 - self.num_dense_layers / shape.num_layers
        return matrices * shape.d_model * self.width * self.num_experts * share

    def active_parameters(self, shape: ModelShape) -> float:
        """Returns the feed-forward weights that a token meets in a block, on average."""
        matrices = 3 if shape.feed_forward == "swiglu" else 2
        dense = self.num_dense_layers / shape.num_layers
        active = self.width * self.experts_per_token + self.shared_width
        return matrices * shape.d_model * (active * (1 - dense) + shape.d_ff * dense)
