"""The order of samples: a stream that maps any position to a source and a sample in constant time.

The order depends only on the sizes of the sources, their weights, the seed and the window, not on
the number of ranks or the batch size. Nothing is stored, so a run resumes anywhere immediately.

Keys come from the finalizer of splitmix64 (Steele, Lea, Flood 2014). It is implemented here so that
the order depends only on these constants: NumPy's generators may change between versions, but the
order of a run of months must not. Changing a constant changes the order of every run.

An epoch of one source is a keyed bijection on [0, size): a Feistel network with cycle walking. An
index is split into a high and a low part of about equal width. Each round XORs one part with a hash
of the other, which is invertible for any hash, so the network permutes [0, 2^bits), the smallest
power of two that holds `size`. Results outside [0, size) go through the network again until they
are inside (Black, Rogaway 2002): fewer than two passes per index on average. A stored shuffle of
the 10^10 samples of a large corpus would take 80 GB on every rank.

A mixture repeats a cycle of 2^16 slots. Each source has a fraction of the slots, spread evenly: if
it has n slots, its k-th slot is at a random point in the k-th of n equal parts of the cycle. In any
prefix of a cycle, the count of each source therefore deviates from its weight by at most the number
of sources, where independent draws would deviate by the square root of the length.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from paceline.core.errors import UsageError

UInt64Array = npt.NDArray[np.uint64]

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = np.uint64(0x94D049BB133111EB)
_FIRST_SHIFT, _SECOND_SHIFT, _THIRD_SHIFT = np.uint64(30), np.uint64(27), np.uint64(31)
_MASK = 2**64 - 1


def mix(values: UInt64Array) -> UInt64Array:
    """Returns a bijective hash of each of `values`, an array of at least one dimension."""
    mixed = values >> _FIRST_SHIFT
    mixed ^= values
    mixed *= _FIRST_FACTOR
    mixed ^= mixed >> _SECOND_SHIFT
    mixed *= _SECOND_FACTOR
    mixed ^= mixed >> _THIRD_SHIFT
    return mixed


def derive(keys: UInt64Array, numbers: npt.NDArray[np.integer] | int) -> UInt64Array:
    """Returns a new key for each pair of `keys` and `numbers`, which broadcast."""
    if isinstance(numbers, int):
        offsets = np.array([(numbers + 1) * _GOLDEN_GAMMA & _MASK], dtype=np.uint64)
    else:
        offsets = numbers.astype(np.uint64) + np.uint64(1)
        offsets *= np.uint64(_GOLDEN_GAMMA)
    return mix(keys + offsets)


def key_of(numbers: Iterable[int]) -> UInt64Array:
    """Returns one key, an array of one element, for a sequence of integers of any size."""
    key = np.zeros(1, dtype=np.uint64)
    for number in numbers:
        key = derive(key, number)
    return key


IndexArray = npt.NDArray[np.int64]

LARGEST_SIZE = 2**62
_NUM_ROUNDS = 6


def permute(indices: IndexArray, size: int, keys: UInt64Array) -> IndexArray:
    """Maps `indices` bijectively from [0, size) to [0, size).

    Args:
        indices: One-dimensional, each in [0, size).
        size: At most 2^62.
        keys: One key for all indices (an array of one element), or one key per index. Each key
            selects a different permutation.
    """
    if not 0 < size <= LARGEST_SIZE:
        raise UsageError(f"cannot permute {size} samples; a split has 1 to 2^62 samples")
    num_bits = (size - 1).bit_length()
    round_keys = [derive(keys, number) for number in range(_NUM_ROUNDS)]
    permuted = _feistel(indices.astype(np.uint64), num_bits, round_keys)
    limit = np.uint64(size)
    outside = np.flatnonzero(permuted >= limit)
    while outside.size:
        own_keys = round_keys if keys.size == 1 else [each[outside] for each in round_keys]
        walked = _feistel(permuted[outside], num_bits, own_keys)
        permuted[outside] = walked
        outside = outside[walked >= limit]
    return permuted.astype(np.int64)


def _feistel(indices: UInt64Array, num_bits: int, round_keys: list[UInt64Array]) -> UInt64Array:
    low_bits = np.uint64((num_bits + 1) // 2)
    high_bits = np.uint64(num_bits // 2)
    # The upper bits of a product are the best mixed.
    low_shift, high_shift = np.uint64(64) - low_bits, np.uint64(64) - high_bits
    if num_bits < 2:
        # One part would have no bits, and a shift by 64 is undefined.
        return indices ^ (mix(round_keys[0]) & np.uint64(num_bits))
    low = indices & ((np.uint64(1) << low_bits) - np.uint64(1))
    high = indices >> low_bits
    for number, key in enumerate(round_keys):
        if number % 2 == 0:
            high ^= mix(low + key) >> high_shift
        else:
            low ^= mix(high + key) >> low_shift
    return (high << low_bits) | low


_BLOCKS, _SHORT_BLOCK, _WITHIN = range(3)
"""Purposes for which keys are derived from the key of an epoch."""


class SampleOrder:
    """The order of the samples of one source.

    Without a window, any sample may follow any other. With a window, an epoch visits blocks of
    `window` consecutive samples in random order and shuffles within each block, so a cache that
    holds the shards of one or two blocks is sufficient.

    Args:
        num_samples: Samples in an epoch.
        seed: Random seed; determines the order together with `source`.
        source: Number of the source in its mixture, so that equal sources differ in order.
        window: Samples in a block; None shuffles whole epochs.
    """

    def __init__(
        self, num_samples: int, *, seed: int, source: int = 0, window: int | None = None
    ) -> None:
        if num_samples < 1:
            raise UsageError(
                "no samples: a sample is one token longer than the context; use more text"
            )
        if window is not None and window < 1:
            raise UsageError(f"a window of {window} samples is empty; give 1 or more")
        self.num_samples = num_samples
        self.window = window if window is not None and window < num_samples else None
        self._key = key_of((seed, source))

    def samples_at(self, positions: IndexArray) -> IndexArray:
        """Returns the sample at each position of the stream."""
        if not positions.size:
            return positions
        epochs, indices = np.divmod(positions, self.num_samples)
        # Almost always all positions are in one epoch and share one key.
        is_one = bool((epochs == epochs[0]).all())
        keys = derive(self._key, epochs[:1] if is_one else epochs)
        if self.window is None:
            return permute(indices, self.num_samples, keys)
        return self._windowed(indices, self.window, keys)

    def _windowed(self, indices: IndexArray, window: int, keys: UInt64Array) -> IndexArray:
        num_blocks, num_rest = divmod(self.num_samples, window)
        # The short block with the last samples is visited at a random point in the epoch.
        points = derive(keys, _SHORT_BLOCK) % np.uint64(num_blocks + 1)
        short_start = points.astype(np.int64) * window
        is_after = indices >= short_start + num_rest
        is_short = (indices >= short_start) & ~is_after
        among_full = indices - np.where(is_after, num_rest, 0)
        slots, offsets = np.divmod(among_full, window)
        slots[is_short] = 0  # Any valid slot: the result is overwritten below.
        blocks = permute(slots, num_blocks, derive(keys, _BLOCKS))
        within_keys = derive(keys, _WITHIN)
        samples = blocks * window + permute(offsets, window, derive(within_keys, blocks))
        if is_short.any():
            short_keys = np.broadcast_to(derive(within_keys, num_blocks), indices.shape)[is_short]
            short_offsets = (indices - short_start)[is_short]
            samples[is_short] = num_blocks * window + permute(short_offsets, num_rest, short_keys)
        return samples


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
        self.num_slots_of = slots_by_weight(weights)
        keys = [
            derive(key_of((_PURPOSE, seed, source)), np.arange(n)) for source, n in self._counts()
        ]
        # 53 bits are exact in float64, so the points are the same on every machine.
        points = [
            (np.arange(n) + (key >> np.uint64(11)).astype(np.float64) * 2.0**-53) / n
            for key, (_, n) in zip(keys, self._counts(), strict=True)
        ]
        order = np.argsort(np.concatenate(points), kind="stable")
        sources = np.repeat(np.arange(len(weights)), self.num_slots_of)
        ordinals = np.concatenate([np.arange(n) for n in self.num_slots_of])
        self._source_of_slot: npt.NDArray[np.int64] = sources[order]
        # Points ascend within a source, so its slots are in the order of their ordinals.
        self._ordinal_of_slot: npt.NDArray[np.int64] = ordinals[order]

    def locate(self, positions: IndexArray) -> tuple[IndexArray, IndexArray]:
        """Returns the source of each position, and the position in that source's stream."""
        cycles, slots = np.divmod(positions, NUM_SLOTS)
        sources = self._source_of_slot[slots]
        return sources, cycles * self.num_slots_of[sources] + self._ordinal_of_slot[slots]

    def _counts(self) -> list[tuple[int, int]]:
        return list(enumerate(self.num_slots_of.tolist()))


def slots_by_weight(weights: Sequence[float]) -> npt.NDArray[np.int64]:
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
    """An endless stream of samples from one or more sources."""

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
