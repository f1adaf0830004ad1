"""A keyed bijection on [0, size) that needs no memory: a Feistel network with cycle walking.

An index is split into a high and a low part of about equal width. Each round XORs one part with a
hash of the other, which is invertible for any hash, so the network permutes [0, 2^bits), the
smallest power of two that holds `size`. Results outside [0, size) go through the network again
until they are inside (Black, Rogaway 2002): fewer than two passes per index on average. A stored
shuffle of the 10^10 samples of a large corpus would take 80 GB on every rank.
"""

import numpy as np
import numpy.typing as npt

from paceline.core.errors import UsageError
from paceline.data.sampling.hashing import UInt64Array, derive, mix

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
