"""Tests that every prefix of a mixture follows its weights, and that no source has gaps."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import UsageError
from paceline.data.sampling.stream import NUM_SLOTS, Mixture, share_slots

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
    assert share_slots([1, 1, 1]).tolist() == [21846, 21845, 21845]


def test_the_mixture_of_a_seed_never_changes() -> None:
    sources, _ = Mixture([2, 1, 1], seed=0).locate(np.arange(24))
    assert "".join(map(str, sources)) == "012000211200021020102010"


@pytest.mark.parametrize("weights", [[], [1, 0], [1, -1], [1, float("nan")]])
def test_weights_that_mean_nothing_are_refused(weights: list[float]) -> None:
    with pytest.raises(UsageError, match="positive"):
        share_slots(weights)


def test_a_weight_that_is_too_small_names_its_source() -> None:
    with pytest.raises(UsageError, match=r"source 1 .* leave it out"):
        share_slots([1, 1e-7])
