import itertools
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.accounting import attention_saved_bytes
from paceline.accounting.attention import (
    attention_flops,
    minimum_attention_bytes,
    tiled_attention_peak_bytes,
)
from paceline.core import BatchShape
from paceline.core.specs import AttentionKind
from paceline.core.units import MIB

FLASH = [kind for kind in get_args(AttentionKind) if kind != "naive"]


def shape(num_sequences: int, context_length: int) -> BatchShape:
    return BatchShape(num_sequences=num_sequences, context_length=context_length)


@given(st.integers(1, 4), st.integers(1, 12), st.integers(1, 8))
def test_every_pair_that_meets_is_counted(batch: int, context: int, head_dim: int) -> None:
    pairs = list(itertools.product(range(context), repeat=2))
    for causal in (False, True):
        met = sum(key <= query or not causal for query, key in pairs)
        flops = attention_flops(shape(batch, context), head_dim, causal=causal)
        assert flops.forward == 4 * batch * met * head_dim
        assert flops.backward == 2.5 * flops.forward
        assert flops.total == flops.forward + flops.backward


def test_a_causal_mask_leaves_half_of_a_long_sequence() -> None:
    batch = shape(1, 16384)
    full, causal = (attention_flops(batch, 64, causal=causal) for causal in (False, True))
    assert causal.total / full.total == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("implementation", FLASH)
def test_one_number_per_query_stands_for_the_scores(implementation: AttentionKind) -> None:
    # By hand: four tensors of 2 x 100 x 8, and 200 log-sum-exps of 4 bytes, or 8 for float64.
    for element_bytes, expected in ((4, 26_400), (2, 13_600), (8, 52_800)):
        saved = attention_saved_bytes(implementation, shape(2, 100), 8, element_bytes, causal=True)
        assert saved == expected


def test_stored_probabilities_are_kept_in_every_format_that_they_had() -> None:
    vectors, scores = 3 * 2 * 100 * 8, 2 * 100 * 100
    for element_bytes, score_bytes in ((4, 4), (2, 4 + 2), (8, 8)):
        saved = attention_saved_bytes("naive", shape(2, 100), 8, element_bytes, causal=False)
        assert saved == vectors * element_bytes + scores * score_bytes
        masked = attention_saved_bytes("naive", shape(2, 100), 8, element_bytes, causal=True)
        assert masked == saved + 100 * 100


def test_the_peak_of_tiles_by_hand() -> None:
    # 16,384 tokens of width 64 in float32: 8 tensors of 4 MiB, 64 KiB of log-sum-exps, two tiles of
    # 4 MiB, three tensors of 256 queries, three numbers for each query, and a zero.
    expected = 8 * 4 * MIB + 16384 * 4 + 2 * 4 * MIB + 3 * 256 * 64 * 4 + 3 * 256 * 4 + 4
    assert tiled_attention_peak_bytes(shape(1, 16384), 64, 4, causal=False) == expected
    # With narrow heads, the peak has a causal tile's mask instead of a third tensor of queries.
    narrow = tiled_attention_peak_bytes(shape(1, 16384), 8, 4, causal=True)
    unmasked = tiled_attention_peak_bytes(shape(1, 16384), 8, 4, causal=False)
    assert narrow - unmasked == 256 * 255 - 256 * 8 * 4 - 256 * 4


@given(st.integers(1, 16), st.integers(4096, 100_000), st.integers(1, 256))
def test_tiles_grow_by_the_same_for_every_token(batch: int, context: int, head_dim: int) -> None:
    for element_bytes in (2, 4):
        first, second, third = (
            tiled_attention_peak_bytes(
                shape(batch, context + more), head_dim, element_bytes, causal=True
            )
            for more in (0, 1, 2)
        )
        assert second - first == third - second
        # Each further token of a sequence adds 8 numbers per channel, and one log-sum-exp.
        at_least = batch * (8 * head_dim * element_bytes + 4)
        copies = 0 if element_bytes == 4 else 4 * min(batch, 8) * head_dim * 4
        assert second - first == at_least + copies


@given(st.integers(1, 16), st.integers(1, 20_000), st.integers(1, 256))
def test_attention_bounds_grow_with_the_square(batch: int, context: int, head_dim: int) -> None:
    small, double = shape(batch, context), shape(batch, 2 * context)
    eager = minimum_attention_bytes("naive", small, head_dim, 4, compiled=False)
    assert minimum_attention_bytes("naive", small, head_dim, 4, compiled=True) < eager
    grown = minimum_attention_bytes("naive", double, head_dim, 4, compiled=False)
    assert 2 * eager <= grown <= 4 * eager


@given(st.sampled_from(FLASH), st.integers(1, 16), st.integers(1, 20_000), st.sampled_from([2, 4]))
def test_other_bounds_grow_with_the_tokens(
    implementation: AttentionKind, batch: int, context: int, element_bytes: int
) -> None:
    small, double = (
        minimum_attention_bytes(
            implementation, shape(batch, length), 64, element_bytes, compiled=False
        )
        for length in (context, 2 * context)
    )
    assert double == 2 * small
    peak = tiled_attention_peak_bytes(shape(batch, context), 64, element_bytes, causal=False)
    assert small < peak
