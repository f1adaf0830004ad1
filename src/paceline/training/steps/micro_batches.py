"""A rank's sequences in passes of bounded size: the same number of passes on all ranks.

Strategies that shard parameters communicate in every pass. Ranks whose parts of a batch differ by a
sequence must make as many passes as the others, if need be with one that does not count.
"""

from collections.abc import Iterator

from torch import Tensor


def micro_batches(
    tokens: Tensor, targets: Tensor, passes: int
) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Yields the sequences of each pass, what follows them, and whether the pass counts.

    Args:
        tokens: This rank's sequences, at least one.
        targets: The token that follows each.
        passes: How many passes every rank makes.
    """
    for inputs, expected in zip(
        tokens.tensor_split(passes), targets.tensor_split(passes), strict=True
    ):
        if len(inputs):
            yield inputs, expected, True
        else:
            yield tokens[:1], targets[:1], False
