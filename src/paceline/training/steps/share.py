"""A rank's share of each batch, and its weight in sums over ranks."""

import dataclasses
from typing import Self

from torch import Tensor

from paceline.parallel.mesh.context import ContextShare
from paceline.parallel.mesh.groups import MeshGroups


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchShare:
    """One rank's share of every batch."""

    data_rank: int
    """Index of the part it reads, of `data_ranks` parts; several ranks may read the same part."""
    data_ranks: int
    gradient_ranks: int
    """Number of ranks over which gradients are averaged: those with different tokens."""
    loss_weight: float
    """Weight of its loss in the sum over ranks: several ranks may compute the same loss."""
    counts_data: bool
    """Whether this rank adds its sequences to the step's digest: one rank per data-parallel rank
    does."""
    context: ContextShare | None = None
    """This rank's tokens of each sequence; None if it has all."""

    @classmethod
    def of_data_parallel(cls, rank: int, world_size: int) -> Self:
        """Returns the share of a rank in a purely data-parallel run."""
        return cls(
            data_rank=rank,
            data_ranks=world_size,
            gradient_ranks=world_size,
            loss_weight=1.0,
            counts_data=True,
        )

    @classmethod
    def of_mesh(cls, groups: MeshGroups) -> Self:
        """Returns the share of a rank on a mesh."""
        at = groups.at
        return cls(
            data_rank=groups.data_rank,
            data_ranks=groups.data_ranks,
            gradient_ranks=groups.gradient_ranks,
            loss_weight=1 / (groups.layout.tensor * groups.layout.pipeline),
            counts_data=at.tensor == at.context == at.pipeline == 0,
            context=None if groups.context is None else ContextShare(groups.context),
        )

    def take(self, tokens: Tensor) -> Tensor:
        """Returns this rank's part of the tokens of whole sequences."""
        return tokens if self.context is None else self.context.take(tokens)
