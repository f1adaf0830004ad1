"""The stream of a run: from a position to the source and the sample that it holds.

Everything that decides the order is in here and nothing else: how many ranks share the positions,
and how many positions make a step, does not matter.
"""

from collections.abc import Sequence

import numpy as np

from paceline.core.errors import UsageError
from paceline.data.sampling.mixture import Mixture
from paceline.data.sampling.order import SampleOrder
from paceline.data.sampling.permutation import IndexArray


class SampleStream:
    """An endless stream of samples of one or more sources.

    Args:
        num_samples: Samples in an epoch of each source.
        weights: Relative weights of the sources, in samples.
        seed: Decides the order.
        window: Samples in a block of each source's order; None shuffles whole epochs.
    """

    def __init__(
        self,
        num_samples: Sequence[int],
        *,
        weights: Sequence[float],
        seed: int,
        window: int | None = None,
    ) -> None:
        if seed < 0:
            raise UsageError(f"seed {seed}: give 0 or more")
        self._orders = [
            SampleOrder(number, seed=seed, source=source, window=window)
            for source, number in enumerate(num_samples)
        ]
        self._mixture = Mixture(weights, seed=seed) if len(self._orders) > 1 else None

    def locate(self, positions: IndexArray) -> tuple[IndexArray, IndexArray]:
        """Returns the source and the sample of each position."""
        if self._mixture is None:
            return np.zeros_like(positions), self._orders[0].samples_at(positions)
        sources, own_positions = self._mixture.locate(positions)
        samples = np.empty_like(positions)
        for source in np.unique(sources):
            is_here = sources == source
            samples[is_here] = self._orders[source].samples_at(own_positions[is_here])
        return sources, samples


def rank_range(first: int, num_samples: int, rank: int, world_size: int) -> tuple[int, int]:
    """Returns the positions [start, end) of a rank among those of a step.

    The ranks' ranges in their order are the positions of the step, whatever the world size.
    """
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} of {world_size}: ranks count from 0 to {world_size - 1}")
    if world_size > num_samples:
        raise UsageError(
            f"{num_samples} samples per step cannot be shared by {world_size} ranks; raise the "
            "batch size or use fewer ranks"
        )
    start = first + rank * num_samples // world_size
    return start, first + (rank + 1) * num_samples // world_size
