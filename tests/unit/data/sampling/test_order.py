"""Tests that each epoch has every sample once, in a different order, with and without windows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import UsageError
from paceline.data.sampling.order import SampleOrder

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
