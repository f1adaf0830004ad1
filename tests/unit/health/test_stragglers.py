"""Tests that a histogram of the ranks' times shows an outlier, for any number of ranks."""

import torch

from paceline.health.stragglers import Stragglers, _bin_of, _has_outlier

CPU = torch.device("cpu")


def _summed(*times: float) -> list[float]:
    bins = [0.0] * 96
    for seconds in times:
        bins[_bin_of(seconds)] += 1
    return bins


def test_an_outlier_is_seen_and_noise_is_not() -> None:
    assert _has_outlier(_summed(0.1, 0.15))
    assert _has_outlier(_summed(*[0.1] * 999, 0.14))
    assert not _has_outlier(_summed(0.1, 0.1))
    assert not _has_outlier(_summed(*[0.1, 0.102, 0.104] * 100))
    assert not _has_outlier([0.0] * 96)


def test_times_beyond_the_bins_are_in_the_last_ones() -> None:
    assert (_bin_of(0.0), _bin_of(1e9)) == (0, 95)


def test_a_rank_says_that_it_was_stopped() -> None:
    stragglers = Stragglers(CPU)
    for _ in range(7):
        *bins, stopped = stragglers.notes(0.1, 0.0)
        assert not stopped
    assert sum(bins) == 1
    assert stragglers.notes(0.1, 4.8)[-1] == 1  # Stopped while it waited.
    assert stragglers.notes(5.1, 0.0)[-1] == 1  # Stopped while it computed.
    assert stragglers.notes(0.1, 0.0)[-1] == 0
