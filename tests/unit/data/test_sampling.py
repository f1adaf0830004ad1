"""Tests of the order of samples: permutations, epochs, mixtures and the stream of a run."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.core.errors import UsageError
from paceline.data.sampling import (
    LARGEST_SIZE,
    NUM_SLOTS,
    Mixture,
    SampleOrder,
    SampleStream,
    key_of,
    mix,
    permute,
    rank_range,
    slots_by_weight,
)

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


@pytest.mark.parametrize(
    ("size", "orders"),
    [
        (1, [[0], [0], [0]]),
        (3, [[0, 1, 2], [1, 0, 2], [2, 0, 1]]),
        (4, [[0, 1, 2, 3], [1, 0, 3, 2], [2, 0, 3, 1]]),
        (8, [[4, 1, 7, 3, 5, 0, 2, 6], [7, 3, 1, 4, 6, 2, 0, 5], [4, 7, 1, 0, 6, 5, 3, 2]]),
    ],
)
def test_orders_of_few_samples_never_change_either(size: int, orders: list[list[int]]) -> None:
    keys = [key_of((7, number)) for number in range(len(orders))]
    assert [permute(np.arange(size), size, key).tolist() for key in keys] == orders


def test_the_first_of_two_never_changes() -> None:
    firsts = [permute(np.array([0]), 2, key_of((7, number)))[0] for number in range(16)]
    assert firsts == [1, 1, 0, 1, 0, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1]


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


SIZES = st.integers(1, 400)
WINDOWS = st.none() | st.integers(1, 500)


@settings(max_examples=150, deadline=None)
@given(num_samples=SIZES, window=WINDOWS, seed=st.integers(0, 2**64), epoch=st.integers(0, 10**6))
def test_each_sample_comes_once_per_epoch(
    num_samples: int, window: int | None, seed: int, epoch: int
) -> None:
    order = SampleOrder(num_samples, seed=seed, window=window)
    samples = order.samples_at(np.arange(num_samples) + epoch * num_samples)
    assert sorted(samples.tolist()) == list(range(num_samples))


@settings(max_examples=80, deadline=None)
@given(num_samples=SIZES, window=WINDOWS, start=st.integers(0, 10**15), length=st.integers(0, 900))
def test_a_position_does_not_depend_on_what_is_asked_with_it(
    num_samples: int, window: int | None, start: int, length: int
) -> None:
    order = SampleOrder(num_samples, seed=3, window=window)
    positions = np.arange(start, start + length)
    together = order.samples_at(positions).tolist()
    picked = range(0, length, 37)
    assert [together[i] for i in picked] == [
        order.samples_at(positions[i : i + 1])[0] for i in picked
    ]


@settings(max_examples=100, deadline=None)
@given(num_samples=st.integers(2, 400), window=st.integers(1, 100), seed=st.integers(0, 99))
def test_a_window_visits_its_blocks_one_after_another(
    num_samples: int, window: int, seed: int
) -> None:
    samples = SampleOrder(num_samples, seed=seed, window=window).samples_at(np.arange(num_samples))
    blocks = samples // window
    changes = int((np.diff(blocks) != 0).sum())
    assert changes == len(set(blocks.tolist())) - 1


def test_a_window_of_all_samples_is_none() -> None:
    positions = np.arange(90)
    whole = SampleOrder(30, seed=5).samples_at(positions)
    assert SampleOrder(30, seed=5, window=30).samples_at(positions).tolist() == whole.tolist()


def test_epochs_seeds_and_sources_differ_in_order() -> None:
    positions = np.arange(100)
    orders = [
        SampleOrder(100, seed=seed, source=source, window=window).samples_at(
            positions + 100 * epoch
        )
        for seed in range(3)
        for source in range(2)
        for window in (None, 30)
        for epoch in range(3)
    ]
    assert len({tuple(order.tolist()) for order in orders}) == len(orders)


def test_the_short_block_comes_anywhere() -> None:
    order = SampleOrder(35, seed=0, window=10)
    places = {
        int(np.flatnonzero(order.samples_at(np.arange(35) + 35 * epoch) >= 30)[0])
        for epoch in range(100)
    }
    assert places == {0, 10, 20, 30}


def test_blocks_are_shuffled_within() -> None:
    samples = SampleOrder(10**6, seed=1, window=1000).samples_at(np.arange(1000))
    assert len(set((samples // 1000).tolist())) == 1
    assert abs(np.corrcoef(samples, np.arange(1000))[0, 1]) < 0.15


def test_what_holds_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="no sample"):
        SampleOrder(0, seed=0)
    with pytest.raises(UsageError, match="window of 0"):
        SampleOrder(5, seed=0, window=0)


WEIGHTS = st.lists(st.floats(0.001, 1000), min_size=1, max_size=8).filter(
    lambda weights: min(weights) / sum(weights) > 2 / NUM_SLOTS
)


@settings(max_examples=40, deadline=None)
@given(weights=WEIGHTS, seed=st.integers(0, 2**64))
def test_every_prefix_holds_to_the_weights(weights: list[float], seed: int) -> None:
    sources, _ = Mixture(weights, seed=seed).locate(np.arange(100_000))
    lengths = np.arange(1, 100_001)
    for source, weight in enumerate(weights):
        share = weight / sum(weights)
        counts = np.cumsum(sources == source)
        # One sample of this source, its share of one per other source, and rounding in each cycle.
        most = 1 - share + share * (len(weights) - 1) + 2
        assert np.abs(counts - share * lengths).max() <= most


@settings(max_examples=40, deadline=None)
@given(weights=WEIGHTS, start=st.integers(0, 10**12))
def test_each_source_goes_on_without_a_gap(weights: list[float], start: int) -> None:
    mixture = Mixture(weights, seed=1)
    sources, ordinals = mixture.locate(np.arange(start, start + 3000))
    for source in range(len(weights)):
        own = ordinals[sources == source]
        assert (np.diff(own) == 1).all()
    assert Mixture(weights, seed=1).locate(np.array([start]))[1][0] == ordinals[0]


def test_each_source_starts_at_its_first_sample() -> None:
    sources, ordinals = Mixture([5, 1, 2], seed=0).locate(np.arange(100))
    assert [ordinals[sources == source][0] for source in range(3)] == [0, 0, 0]


def test_equal_remainders_are_shared_in_order() -> None:
    assert slots_by_weight([1, 1, 1]).tolist() == [21846, 21845, 21845]


def test_the_mixture_of_a_seed_never_changes() -> None:
    sources, _ = Mixture([2, 1, 1], seed=0).locate(np.arange(24))
    assert "".join(map(str, sources)) == "012000211200021020102010"


@pytest.mark.parametrize("weights", [[], [1, 0], [1, -1], [1, float("nan")]])
def test_weights_that_mean_nothing_are_refused(weights: list[float]) -> None:
    with pytest.raises(UsageError, match="positive"):
        slots_by_weight(weights)


def test_a_weight_that_is_too_small_names_its_source() -> None:
    with pytest.raises(UsageError, match=r"source 1 .* leave it out"):
        slots_by_weight([1, 1e-7])


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_ranks_in_their_order_are_the_step(data: st.DataObject) -> None:
    batch_size = data.draw(st.integers(1, 200))
    world_size = data.draw(st.integers(1, batch_size))
    first = data.draw(st.integers(0, 10**15))
    ranges = [rank_range(first, batch_size, rank, world_size) for rank in range(world_size)]
    assert ranges[0][0] == first
    assert ranges[-1][1] == first + batch_size
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
    sizes = [end - start for start, end in ranges]
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=50, deadline=None)
@given(
    num_samples=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    window=st.none() | st.integers(1, 50),
    start=st.integers(0, 10**9),
)
def test_each_source_has_its_own_epochs(
    num_samples: list[int], window: int | None, start: int
) -> None:
    weights = [1 + number for number in range(len(num_samples))]
    stream = SampleStream(num_samples, weights=weights, seed=7, window=window)
    sources, samples = stream.locate(np.arange(start, start + 2000))
    again = stream.locate(np.arange(start + 500, start + 600))
    assert again[0].tolist() == sources[500:600].tolist()
    assert again[1].tolist() == samples[500:600].tolist()
    # From the start of the stream, every `size` samples of a source are one epoch.
    sources, samples = stream.locate(np.arange(4000))
    for source, size in enumerate(num_samples):
        own = samples[sources == source]
        whole = len(own) // size * size
        assert np.bincount(own[:whole], minlength=size).tolist() == [whole // size] * size


def test_two_sources_share_a_stream() -> None:
    sources, samples = SampleStream([5, 7], weights=[1, 3], seed=3).locate(np.arange(4000))
    assert np.bincount(sources).tolist() == [1000, 3000]
    assert set(samples[sources == 1].tolist()) == set(range(7))


def test_a_rank_that_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="rank 4 of 4"):
        rank_range(0, 8, 4, 4)
    with pytest.raises(UsageError, match="8 samples per step cannot be shared by 9 ranks"):
        rank_range(0, 8, 0, 9)
    with pytest.raises(UsageError, match="seed -1"):
        SampleStream([3], weights=[1], seed=-1)
