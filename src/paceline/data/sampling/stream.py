"""The stream of a run: maps a position to a source and a sample.

The order depends only on the arguments here. It does not depend on the number of ranks or on the
batch size.

Mixes several sources into one stream in proportion to their weights, in constant time.

A cycle of 2^16 slots repeats forever. Each source has its share of the slots, spread evenly: if it
has n slots, its k-th slot is at a random place in the k-th of n equal parts of the cycle. In any
prefix of a cycle, the count of each source therefore deviates from its share by at most the number
of sources, where independent draws would deviate by the square root of the length. The sample that
a position takes from its source is known without counting.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.core.errors import UsageError
from paceline.data.sampling.order import IndexArray, SampleOrder, derive, key_of

NUM_SLOTS = 2**16
_PURPOSE = int.from_bytes(b"mixture", "little")
"""Makes the keys of a mixture differ from those of an order with the same seed."""


class Mixture:
    """Maps each position of a stream to a source and a position in that source's stream.

    Args:
        weights: Relative weights of the sources, in samples; each at least 2^-16 of their sum.
        seed: Random seed of the order of the sources.
    """

    def __init__(self, weights: Sequence[float], *, seed: int) -> None:
        self.num_slots_of = share_slots(weights)
        keys = [
            derive(key_of((_PURPOSE, seed, source)), np.arange(n)) for source, n in self._counts()
        ]
        # 53 bits are exact in float64, so the places are the same on every machine.
        places = [
            (np.arange(n) + (key >> np.uint64(11)).astype(np.float64) * 2.0**-53) / n
            for key, (_, n) in zip(keys, self._counts(), strict=True)
        ]
        order = np.argsort(np.concatenate(places), kind="stable")
        sources = np.repeat(np.arange(len(weights)), self.num_slots_of)
        ordinals = np.concatenate([np.arange(n) for n in self.num_slots_of])
        self._source_of_slot: npt.NDArray[np.int64] = sources[order]
        # Places ascend within a source, so its slots are in the order of their ordinals.
        self._ordinal_of_slot: npt.NDArray[np.int64] = ordinals[order]

    def locate(self, positions: IndexArray) -> tuple[IndexArray, IndexArray]:
        """Returns the source of each position, and the position in that source's stream."""
        cycles, slots = np.divmod(positions, NUM_SLOTS)
        sources = self._source_of_slot[slots]
        return sources, cycles * self.num_slots_of[sources] + self._ordinal_of_slot[slots]

    def _counts(self) -> list[tuple[int, int]]:
        return list(enumerate(self.num_slots_of.tolist()))


def share_slots(weights: Sequence[float]) -> npt.NDArray[np.int64]:
    """Divides the slots of a cycle by weight, with the largest-remainder method."""
    exact = np.asarray(weights, dtype=np.float64)
    if not exact.size or not np.isfinite(exact).all() or (exact <= 0).any():
        raise UsageError(
            f"weights {list(weights)}: every source needs a positive weight; leave out the others"
        )
    exact = exact / exact.sum() * NUM_SLOTS
    counts: npt.NDArray[np.int64] = np.floor(exact).astype(np.int64)
    by_remainder = np.argsort(counts - exact, kind="stable")
    counts[by_remainder[: NUM_SLOTS - counts.sum()]] += 1
    if not counts.all():
        number = int(np.flatnonzero(counts == 0)[0])
        raise UsageError(
            f"source {number} has a weight of {exact[number] / NUM_SLOTS:.2g} of the total, less "
            f"than one sample in {NUM_SLOTS:,}; leave it out or raise its weight"
        )
    return counts


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
