import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.accounting.attention import AttentionKernel, kernel_work, visible_pairs

BLOCK = 128


def _by_hand(
    kernel: AttentionKernel, length: int, head_dim: int, causal: bool, queries: int, keys: int
) -> tuple[float, float]:
    """Returns FLOPs and moved bytes, counted over all programs and visible pairs."""
    pairs = sum(1 for i, j in itertools.product(range(length), repeat=2) if not causal or j <= i)
    row = 2 * head_dim
    moved = 0
    if kernel == "key_value_gradient":
        for first_key in range(0, length, keys):
            last_key = min(first_key + keys, length)
            moved += (last_key - first_key) * 4 * row
            moved += (length - (first_key if causal else 0)) * (2 * row + 8)
        return 8 * head_dim * pairs, moved
    for first_query in range(0, length, queries):
        last_query = min(first_query + queries, length)
        own = last_query - first_query
        visible = last_query if causal else length
        if kernel == "forward":
            moved += own * (2 * row + 4) + visible * 2 * row
        else:
            moved += own * (3 * row + 8) + visible * 2 * row
    return (4 if kernel == "forward" else 6) * head_dim * pairs, moved


@given(
    st.sampled_from(["forward", "key_value_gradient", "query_gradient"]),
    st.integers(1, 40),
    st.sampled_from([16, 64]),
    st.booleans(),
    st.sampled_from([4, 16]),
    st.sampled_from([4, 8]),
)
def test_work_is_what_the_programs_do(
    kernel: AttentionKernel, length: int, head_dim: int, causal: bool, queries: int, keys: int
) -> None:
    work = kernel_work(
        kernel,
        length=length,
        head_dim=head_dim,
        element_bytes=2,
        causal=causal,
        block_queries=queries,
        block_keys=keys,
    )
    assert (work.flops, work.worst_bytes) == _by_hand(
        kernel, length, head_dim, causal, queries, keys
    )
    assert work.best_bytes <= work.worst_bytes
    assert work.worst_intensity <= work.best_intensity


def test_a_single_tile_moves_everything_once() -> None:
    options = {"length": 64, "head_dim": 64, "element_bytes": 2, "causal": True}
    work = kernel_work("forward", **options, block_queries=64, block_keys=64)
    assert work.worst_bytes == work.best_bytes == 4 * 64 * 64 * 2 + 64 * 4


@pytest.mark.parametrize("causal", [False, True])
def test_backward_is_three_and_a_half_times_forward(causal: bool) -> None:
    options = {"length": 512, "head_dim": 64, "element_bytes": 2, "causal": causal}
    blocks = {"block_queries": BLOCK, "block_keys": BLOCK}
    forward = kernel_work("forward", **options, **blocks).flops
    backward = sum(
        kernel_work(kernel, **options, **blocks).flops
        for kernel in ("delta", "key_value_gradient", "query_gradient")
    )
    assert backward == 3.5 * forward
    assert forward == 4 * 64 * visible_pairs(512, causal=causal)
