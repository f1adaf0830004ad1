"""Splits a rank's sequences into micro-batches: the same number of passes on all ranks.

Strategies that shard parameters communicate in every pass. Ranks whose shares of a batch differ by
a sequence must therefore run the same number of passes, if necessary with one that does not count.
"""

from collections.abc import Iterator

from torch import Tensor


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
