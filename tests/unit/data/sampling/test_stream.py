"""Tests that the stream does not depend on its division into steps and ranks."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import UsageError
from paceline.data.sampling.stream import SampleStream, rank_range


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


def test_a_rank_that_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="rank 4 of 4"):
        rank_range(0, 8, 4, 4)
    with pytest.raises(UsageError, match="8 samples per step cannot be shared by 9 ranks"):
        rank_range(0, 8, 0, 9)
    with pytest.raises(UsageError, match="seed -1"):
        SampleStream([3], weights=[1], seed=-1)
