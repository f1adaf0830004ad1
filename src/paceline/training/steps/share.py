"""What a rank has of a batch, and what it adds to what all ranks add up."""

import dataclasses
from typing import Self

from torch import Tensor

from paceline.parallel.mesh.context import ContextShare
from paceline.parallel.mesh.groups import MeshGroups


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchShare:
    """One rank's part of every batch."""

    data_rank: int
    """Which sequences it reads, of `data_ranks` parts; ranks of one part read the same."""
    data_ranks: int
    gradient_ranks: int
    """Ranks over which gradients are averaged: those with other tokens."""
    loss_weight: float
    """What its loss counts in the sum over all ranks: several ranks may know the same one."""
    counts_data: bool
    """Whether this rank adds its sequences to the step's digest: one rank per data-parallel rank
    does."""
    context: ContextShare | None = None
    """Its tokens of each sequence; None where it has all."""

    @classmethod
    def of_data_parallel(cls, rank: int, world_size: int) -> Self:
        """Returns the part of a rank whose data alone is its own."""
        return cls(
            data_rank=rank,
            data_ranks=world_size,
            gradient_ranks=world_size,
            loss_weight=1.0,
            counts_data=True,
        )

    @classmethod
    def of_mesh(cls, groups: MeshGroups) -> Self:
        """Returns the part of a rank under a layout."""
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
        """Returns this rank's tokens of whole sequences."""
        return tokens if self.context is None else self.context.take(tokens)
