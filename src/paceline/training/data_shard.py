"""A rank's share of each batch, and its weight in sums over ranks.

Splits a rank's sequences into micro-batches: the same number of passes on all ranks.

Strategies that shard parameters communicate in every pass. Ranks whose shares of a batch differ by
a sequence must therefore run the same number of passes, if necessary with one that does not count.
"""

import dataclasses
from collections.abc import Iterator
from typing import Self

from torch import Tensor

from paceline.parallel.mesh.context import ContextShare
from paceline.parallel.mesh.layout import MeshGroups


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


def micro_batches(
    tokens: Tensor, targets: Tensor, passes: int
) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Yields the inputs of each pass, their targets, and whether the pass counts.

    Args:
        tokens: This rank's sequences, at least one.
        targets: Next token of each position.
        passes: Number of passes on every rank.
    """
    for inputs, expected in zip(
        tokens.tensor_split(passes), targets.tensor_split(passes), strict=True
    ):
        if len(inputs):
            yield inputs, expected, True
        else:
            yield tokens[:1], targets[:1], False
