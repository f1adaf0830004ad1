"""The stream of a run: maps a position to a source and a sample.

The order depends only on the arguments here. It does not depend on the number of ranks or on the
batch size.
"""

from collections.abc import Sequence

import numpy as np

from paceline.core.errors import UsageError
from paceline.data.sampling.mixture import Mixture
from paceline.data.sampling.order import SampleOrder
from paceline.data.sampling.permutation import IndexArray


class SampleStream:
    """An endless stream of samples from one or more sources.

    Args:
        num_samples: Samples in an epoch of each source.
        weights: Relative weights of the sources, in samples.
        seed: Random seed of the order.
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
    """Returns the positions [start, end) of a rank within a step.

    The ranges of all ranks, in rank order, make up the positions of the step for any world size.
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
