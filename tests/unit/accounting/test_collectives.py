import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.accounting.collectives import (
    bus_factor,
    find_warnings,
    fit_collective,
    ring_time_s,
    tree_all_reduce_time_s,
)
from paceline.core import UsageError


def test_bus_factors_are_those_of_nccl_tests() -> None:
    assert bus_factor("all_reduce", 2) == 1.0
    assert bus_factor("all_reduce", 4) == 1.5
    assert bus_factor("all_gather", 4) == 0.75
    assert bus_factor("reduce_scatter", 8) == 0.875
    assert bus_factor("all_to_all", 2) == 0.5
    assert bus_factor("broadcast", 6) == 1.0
    assert bus_factor("reduce", 6) == 1.0


def test_a_perfect_ring_shows_the_line_rate_on_the_bus() -> None:
    for operation in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"):
        seconds = ring_time_s(operation, 1e9, 6, latency_s=0.0, bytes_per_s=25e9)
        assert 1e9 / seconds * bus_factor(operation, 6) == pytest.approx(25e9)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    parts = [
        ring_time_s(operation, 1e8, 5, latency_s=1e-5, bytes_per_s=1e9)
        for operation in ("reduce_scatter", "all_gather")
    ]
    whole = ring_time_s("all_reduce", 1e8, 5, latency_s=1e-5, bytes_per_s=1e9)
    assert sum(parts) == pytest.approx(whole)


def test_trees_win_when_latency_counts_and_rings_when_bytes_do() -> None:
    line = {"latency_s": 1e-5, "bytes_per_s": 25e9}
    assert tree_all_reduce_time_s(1e3, 1024, **line) < ring_time_s("all_reduce", 1e3, 1024, **line)
    assert tree_all_reduce_time_s(1e10, 4, **line) > ring_time_s("all_reduce", 1e10, 4, **line)


@pytest.mark.parametrize(("num_ranks", "hops"), [(1, 0), (2, 2), (5, 6), (8, 6), (1024, 20)])
def test_a_tree_goes_up_and_down(num_ranks: int, hops: int) -> None:
    line = {"latency_s": 1e-5, "bytes_per_s": 25e9}
    assert tree_all_reduce_time_s(0.0, num_ranks, **line) == pytest.approx(hops * 1e-5)
    transfer = 2e9 / 25e9 if num_ranks > 1 else 0.0
    assert tree_all_reduce_time_s(1e9, num_ranks, **line) == pytest.approx(hops * 1e-5 + transfer)


def test_costs_take_arrays() -> None:
    sizes = np.logspace(3, 9, 7)
    ranks = np.array([[2], [16_384]])
    assert ring_time_s("all_reduce", sizes, ranks, latency_s=1e-6, bytes_per_s=1e9).shape == (2, 7)


@given(st.floats(1e-6, 1e-2), st.floats(1e7, 1e12), st.integers(0, 2**32 - 1))
def test_a_line_is_found_again(latency: float, bandwidth: float, seed: int) -> None:
    noise = np.random.default_rng(seed)
    samples = {
        int(size): list((latency + size / bandwidth) * (1 + 0.01 * noise.standard_normal(9)))
        for size in np.logspace(3, 9, 7)
    }
    fit = fit_collective(samples)
    for size in samples:
        assert fit.time_s(size) == pytest.approx(latency + size / bandwidth, rel=0.05)
    assert fit.max_relative_error < 0.05


def test_a_change_of_algorithm_becomes_a_second_segment() -> None:
    def seconds(size: float) -> float:
        return 20e-6 + size / 5e8 if size < 1e6 else 2e-3 + size / 5e9

    sizes = [int(size) for size in np.logspace(3, 9, 13)]
    fit = fit_collective({size: [seconds(size)] * 5 for size in sizes})
    assert len(fit.segments) == 2
    first, second = fit.segments
    assert first.latency_s.value == pytest.approx(20e-6, rel=0.01)
    assert second.bytes_per_s is not None
    assert second.bytes_per_s.value == pytest.approx(5e9, rel=0.01)
    assert fit.max_relative_error < 0.01


def test_one_line_stays_one_segment() -> None:
    sizes = [int(size) for size in np.logspace(3, 9, 13)]
    fit = fit_collective({size: [1e-5 + size / 1e9] * 5 for size in sizes})
    assert len(fit.segments) == 1
    assert fit.segments[0].bytes_per_s is not None
    assert fit.segments[0].bytes_per_s.low == pytest.approx(1e9)


def test_a_flat_line_has_no_bandwidth_and_says_so() -> None:
    fit = fit_collective({1000: [1e-4] * 5, 10_000: [0.99e-4] * 5})
    assert fit.segments[0].bytes_per_s is None
    assert fit.time_s(5000) == pytest.approx(1e-4, rel=0.01)
    (warning,) = find_warnings(fit, bus_bytes_per_s=1e8, line_bytes_per_s=None)
    assert warning.name == "undetermined_bandwidth"


def test_intervals_grow_with_the_spread() -> None:
    generator = np.random.default_rng(0)
    widths = []
    for spread in (0.01, 0.2):
        fit = fit_collective(
            {
                int(size): list((1e-4 + size / 1e9) * generator.lognormal(0, spread, 20))
                for size in np.logspace(4, 9, 6)
            }
        )
        estimate = fit.segments[-1].bytes_per_s
        assert estimate is not None
        assert estimate.low is not None
        assert estimate.high is not None
        assert estimate.low <= estimate.value <= estimate.high
        widths.append((estimate.high - estimate.low) / estimate.value)
    assert widths[1] > 3 * widths[0]


def test_a_fit_needs_two_sizes() -> None:
    with pytest.raises(UsageError, match="two sizes"):
        fit_collective({1000: [1.0]})


def test_the_published_table_with_timed_set_up_is_recognised() -> None:
    published = {10**6: [0.364509], 10**7: [0.372378], 10**8: [0.393590], 10**9: [0.424514]}
    fit = fit_collective(published)
    (warning,) = find_warnings(fit, bus_bytes_per_s=2.4e9, line_bytes_per_s=None)
    assert warning.name == "timed_setup"
    assert "warm up" in warning.remedy


def test_more_than_the_line_carries_is_recognised() -> None:
    fit = fit_collective({10**6: [1e-3], 10**7: [1e-2]})
    (warning,) = find_warnings(fit, bus_bytes_per_s=1e9, line_bytes_per_s=0.25e9)
    assert warning.name == "above_line_rate"
    # An excess of 2% is within the precision of a measurement.
    assert find_warnings(fit, bus_bytes_per_s=0.258e9, line_bytes_per_s=0.25e9)
    assert not find_warnings(fit, bus_bytes_per_s=0.253e9, line_bytes_per_s=0.25e9)
    assert not find_warnings(fit, bus_bytes_per_s=1e12, line_bytes_per_s=None)
