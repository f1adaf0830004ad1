"""Tests of collectives over tiers: placement of groups, and cost."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.accounting.collectives import ring_time_s, tree_all_reduce_time_s
from paceline.core import UsageError
from paceline.predict.cost.cluster import (
    Tier,
    Tiers,
    collective_time_s,
    flat_ring_time_s,
    flat_tree_time_s,
    hierarchical_time_s,
    send_time_s,
)

HOST = Tier(name="host", num_devices=8, latency_s=1e-6, bytes_per_s=450e9)
POD = Tier(name="pod", num_devices=64, latency_s=1e-5, bytes_per_s=50e9)
ALL = Tier(name="all", num_devices=None, latency_s=3e-5, bytes_per_s=10e9)
TIERS = Tiers((HOST, POD, ALL))
SIZE = 1e8


@pytest.mark.parametrize(
    ("group", "stride", "blocks"),
    [
        (1, 1, (1, 1, 1)),
        (8, 1, (8, 1, 1)),
        (4, 2, (4, 1, 1)),
        (2, 8, (1, 2, 1)),
        (16, 1, (8, 2, 1)),
        (128, 1, (8, 8, 2)),
        (4, 64, (1, 1, 4)),
        # Groups of twelve may start inside a host, but always at a multiple of four.
        (12, 1, (4, 1, 3)),
        # The stride does not divide the host, so neighbouring ranks may be on different hosts.
        (2, 3, (1, 1, 2)),
    ],
)
def test_where_groups_lie(group: int, stride: int, blocks: tuple[int, ...]) -> None:
    span = TIERS.span(group, stride)
    assert tuple(int(block) for block in span.blocks) == blocks
    assert np.prod(blocks) == group


@given(st.integers(1, 96), st.sampled_from([1, 2, 4, 8, 24]), st.integers(0, 5))
def test_a_block_never_lies_across_a_border(group: int, stride: int, which: int) -> None:
    # Groups of a mesh start at multiples of group * stride, plus an offset below the stride.
    first = which * group * stride
    ranks = [first + rank * stride for rank in range(group)]
    size = 1
    for tier, block in zip(TIERS.tiers[:-1], TIERS.span(group, stride).blocks, strict=False):
        size *= int(block)
        assert tier.num_devices is not None
        for begin in range(0, group, size):
            domains = {rank // tier.num_devices for rank in ranks[begin : begin + size]}
            assert len(domains) == 1


def test_one_tier_gives_the_plain_formulas() -> None:
    line = {"latency_s": HOST.latency_s, "bytes_per_s": HOST.bytes_per_s}
    span = TIERS.span(8)
    ring = ring_time_s("all_reduce", SIZE, 8, **line)
    assert flat_ring_time_s("all_reduce", span, SIZE) == pytest.approx(ring)
    assert hierarchical_time_s("all_reduce", span, SIZE) == pytest.approx(ring)
    tree = tree_all_reduce_time_s(SIZE, 8, **line)
    assert flat_tree_time_s(span, SIZE) == pytest.approx(tree)


def test_two_tiers_give_the_formula_of_two_tiers() -> None:
    inside = {"latency_s": HOST.latency_s, "bytes_per_s": HOST.bytes_per_s}
    across = {"latency_s": POD.latency_s, "bytes_per_s": POD.bytes_per_s}
    # Reduce-scatter and all-gather inside a host; between these, an all-reduce of an eighth across
    # hosts.
    expected = 2 * ring_time_s("reduce_scatter", SIZE, 8, **inside)
    expected += ring_time_s("all_reduce", SIZE / 8, 4, **across)
    span = TIERS.span(32)
    assert hierarchical_time_s("all_reduce", span, SIZE) == pytest.approx(expected)
    halves = [hierarchical_time_s(half, span, SIZE) for half in ("reduce_scatter", "all_gather")]
    assert sum(halves) == pytest.approx(expected)


def test_a_ring_goes_at_the_pace_of_its_slowest_tier() -> None:
    ring = ring_time_s(
        "all_gather", SIZE, 128, latency_s=ALL.latency_s, bytes_per_s=ALL.bytes_per_s
    )
    assert flat_ring_time_s("all_gather", TIERS.span(128), SIZE) == pytest.approx(ring)
    assert send_time_s(TIERS.span(2, 64), SIZE) == pytest.approx(3e-5 + 1e-2)
    assert send_time_s(TIERS.span(2, 8), SIZE) == pytest.approx(1e-5 + 2e-3)


def test_a_single_rank_sends_nothing() -> None:
    span = TIERS.span(np.array([1, 1]), np.array([1, 512]))
    for operation in ("all_reduce", "all_gather", "reduce_scatter"):
        assert (collective_time_s(operation, span, SIZE) == 0).all()


def test_small_messages_take_the_tree_and_large_ones_the_hierarchy() -> None:
    span = TIERS.span(512)
    small, large = collective_time_s("all_reduce", span, np.array([1e3, 1e10]))
    assert small == flat_tree_time_s(span, 1e3)
    assert large == hierarchical_time_s("all_reduce", span, 1e10)


@given(
    st.integers(1, 600),
    st.sampled_from([1, 2, 3, 8, 64]),
    st.floats(1, 1e11),
    st.integers(0, 2),
    st.floats(1, 100),
)
def test_a_faster_tier_never_slows_a_collective(
    group: int, stride: int, size: float, which: int, factor: float
) -> None:
    tiers = list(TIERS.tiers)
    tiers[which] = dataclasses.replace(
        tiers[which],
        bytes_per_s=tiers[which].bytes_per_s * factor,
        latency_s=tiers[which].latency_s / factor,
    )
    for operation in ("all_reduce", "all_gather", "reduce_scatter"):
        slow = collective_time_s(operation, TIERS.span(group, stride), size)
        fast = collective_time_s(operation, Tiers(tuple(tiers)).span(group, stride), size)
        assert fast <= slow * (1 + 1e-12)


def test_impossible_tiers_are_refused() -> None:
    with pytest.raises(UsageError, match="last tier"):
        Tiers((HOST,))
    with pytest.raises(UsageError, match="last tier"):
        Tiers(())
    with pytest.raises(UsageError, match="'pod' has 60 devices"):
        Tiers((HOST, dataclasses.replace(POD, num_devices=60), ALL))
    with pytest.raises(UsageError, match="'pod' has None"):
        Tiers((HOST, dataclasses.replace(POD, num_devices=None), ALL))
    with pytest.raises(UsageError, match="positive bandwidth"):
        dataclasses.replace(HOST, bytes_per_s=0.0)
