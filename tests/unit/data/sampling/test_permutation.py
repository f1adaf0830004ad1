"""Tests that the permutation is a bijection, differs by key, and leaves no visible order."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.core.errors import UsageError
from paceline.data.sampling.order import LARGEST_SIZE, key_of, mix, permute

KEYS = st.integers(0, 2**64 - 1).map(lambda seed: key_of((seed,)))


@settings(max_examples=150, deadline=None)
@given(size=st.integers(1, 5000), key=KEYS)
@example(size=1, key=key_of((0,)))
@example(size=2, key=key_of((0,)))
@example(size=4097, key=key_of((3,)))
def test_it_is_a_bijection(size: int, key: np.ndarray) -> None:
    permuted = permute(np.arange(size), size, key)
    assert sorted(permuted.tolist()) == list(range(size))


@settings(max_examples=50, deadline=None)
@given(size=st.integers(1, LARGEST_SIZE), key=KEYS, data=st.data())
def test_large_domains_stay_inside_and_apart(
    size: int, key: np.ndarray, data: st.DataObject
) -> None:
    indices = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=50, unique=True))
    permuted = permute(np.array(indices), size, key)
    assert ((permuted >= 0) & (permuted < size)).all()
    assert len(set(permuted.tolist())) == len(indices)


def test_a_key_for_each_index_is_that_key_for_all() -> None:
    keys = np.concatenate([key_of((seed,)) for seed in range(7)])
    indices = np.arange(7) * 11
    each = permute(indices, 100, keys)
    assert each.tolist() == [permute(indices[i : i + 1], 100, keys[i : i + 1])[0] for i in range(7)]


def test_the_order_of_a_seed_never_changes() -> None:
    # A run that resumes with a new version must keep its order.
    assert mix(np.array([1], dtype=np.uint64))[0] == 0x5692161D100B05E5
    assert permute(np.arange(10), 10, key_of((0, 0))).tolist() == [8, 0, 5, 7, 9, 6, 2, 4, 3, 1]


def test_every_place_is_about_equally_likely() -> None:
    # Chi-squared statistic of where each of 64 parts goes, over 200 keys.
    size, parts = 4096, 64
    counts = np.zeros((parts, parts))
    for seed in range(200):
        permuted = permute(np.arange(size), size, key_of((seed,)))
        np.add.at(counts, (np.arange(size) * parts // size, permuted * parts // size), 1)
    expected = 200 * size / parts**2
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    degrees = (parts - 1) ** 2
    assert abs(chi_squared - degrees) < 5 * np.sqrt(2 * degrees)


@pytest.mark.parametrize("size", [1000, 2**20 + 1, 10**12])
def test_neighbours_do_not_stay_together(size: int) -> None:
    permuted = permute(np.arange(1000), size, key_of((5,)))
    apart = np.abs(np.diff(permuted)) / size
    assert 0.30 < apart.mean() < 0.37  # One third for two random places.
    assert abs(np.corrcoef(permuted[:-1], permuted[1:])[0, 1]) < 0.1


@pytest.mark.parametrize("size", [0, 2**62 + 1])
def test_sizes_without_a_permutation_are_refused(size: int) -> None:
    with pytest.raises(UsageError, match=f"cannot permute {size} samples"):
        permute(np.arange(1), size, key_of((0,)))
