"""Keyed 64-bit hashing of integers, vectorised.

This is the finalizer of splitmix64 (Steele, Lea, Flood 2014). It is implemented here so that the
order of samples depends only on these constants: NumPy's generators may change between versions,
but the order of a run of months must not. Changing a constant changes the order of every run.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

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
