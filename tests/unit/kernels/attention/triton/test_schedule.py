"""Tests that loops over tiles visit every tile with visible pairs exactly once, and no other."""

from tests.unit.kernels.attention.triton.interpreter import DEVICE, tl, triton

# The interpreter must be enabled before a kernel is defined.
# isort: split

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.kernels.attention.triton.schedule import key_stages, query_stages

UNMASKED, MASKED = 1, 100


@triton.jit
def _visit_keys(
    visits, num_queries, num_keys, diagonal,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    query_tile = tl.program_id(0)
    row = visits + query_tile * tl.cdiv(num_keys, BLOCK_KEYS)
    unmasked_end, masked_end = key_stages(
        *(query_tile * BLOCK_QUERIES, num_queries, num_keys, diagonal),
        *(BLOCK_QUERIES, BLOCK_KEYS, IS_CAUSAL),
    )
    for key_tile in range(unmasked_end):
        tl.store(row + key_tile, tl.load(row + key_tile) + 1)
    for key_tile in range(unmasked_end, masked_end):
        tl.store(row + key_tile, tl.load(row + key_tile) + 100)


@triton.jit
def _visit_queries(
    visits, num_queries, num_keys, diagonal,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    key_tile = tl.program_id(0)
    num_key_tiles = tl.cdiv(num_keys, BLOCK_KEYS)
    column = visits + key_tile
    masked_begin, unmasked_begin, unmasked_end = query_stages(
        *(key_tile * BLOCK_KEYS, num_queries, num_keys, diagonal),
        *(BLOCK_QUERIES, BLOCK_KEYS, IS_CAUSAL),
    )
    for query_tile in range(masked_begin, unmasked_begin):
        tile = column + query_tile * num_key_tiles
        tl.store(tile, tl.load(tile) + 100)
    for query_tile in range(unmasked_begin, unmasked_end):
        tile = column + query_tile * num_key_tiles
        tl.store(tile, tl.load(tile) + 1)


def _pairs_by_tile(
    num_queries: int, num_keys: int, diagonal: int | None, block_queries: int, block_keys: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the number of visible pairs and of existing pairs in each tile."""
    exists = torch.ones(num_queries, num_keys, dtype=torch.long)
    visible = exists if diagonal is None else exists.tril(diagonal)
    num_rows, num_columns = -(-num_queries // block_queries), -(-num_keys // block_keys)

    def count(pairs: torch.Tensor) -> torch.Tensor:
        padded = torch.zeros(num_rows * block_queries, num_columns * block_keys, dtype=torch.long)
        padded[:num_queries, :num_keys] = pairs
        return padded.reshape(num_rows, block_queries, num_columns, block_keys).sum((1, 3))

    return count(visible), count(exists)


@pytest.mark.parametrize("over", ["keys", "queries"])
@settings(max_examples=150, deadline=None)
@given(
    num_queries=st.integers(1, 70),
    num_keys=st.integers(1, 70),
    diagonal=st.none() | st.integers(-75, 75),
    block_queries=st.sampled_from([16, 32]),
    block_keys=st.sampled_from([16, 32]),
)
@example(num_queries=64, num_keys=64, diagonal=0, block_queries=16, block_keys=16)
@example(num_queries=64, num_keys=64, diagonal=0, block_queries=16, block_keys=32)
@example(num_queries=33, num_keys=17, diagonal=None, block_queries=16, block_keys=16)
@example(num_queries=5, num_keys=40, diagonal=-7, block_queries=16, block_keys=16)
@example(num_queries=40, num_keys=5, diagonal=-35, block_queries=16, block_keys=16)
@example(num_queries=17, num_keys=64, diagonal=47, block_queries=16, block_keys=16)
@example(num_queries=16, num_keys=16, diagonal=14, block_queries=16, block_keys=16)
@example(num_queries=16, num_keys=16, diagonal=15, block_queries=16, block_keys=16)
def test_tiles_are_visited_as_they_must(
    over: str,
    num_queries: int,
    num_keys: int,
    diagonal: int | None,
    block_queries: int,
    block_keys: int,
) -> None:
    visible, exists = _pairs_by_tile(num_queries, num_keys, diagonal, block_queries, block_keys)
    visits = torch.zeros_like(exists, device=DEVICE)
    kernel, grid = (
        (_visit_keys, visits.shape[0]) if over == "keys" else (_visit_queries, visits.shape[1])
    )
    bounded = 0 if diagonal is None else min(max(diagonal, -num_queries), num_keys)
    kernel[(grid,)](
        *(visits, num_queries, num_keys, bounded, block_queries, block_keys), diagonal is not None
    )
    visits = visits.cpu()
    # Tiles with visible pairs are visited exactly once, in one of the stages.
    assert torch.equal((visits == UNMASKED) | (visits == MASKED), visible > 0)
    assert torch.equal(visits == 0, visible == 0)
    # Exactly the fully visible tiles are unmasked. A partial tile of keys is not among them,
    # because keys that do not exist must be hidden.
    is_whole = visible == exists
    if over == "keys" and num_keys % block_keys:
        is_whole[:, -1] = False
    assert torch.equal(visits == UNMASKED, is_whole)
