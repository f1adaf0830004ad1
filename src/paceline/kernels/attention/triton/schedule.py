"""Tile schedules of the Triton kernels, and functions to load and store tiles.

A program owns one tile of queries and iterates over tiles of keys, or owns one tile of keys and
iterates over tiles of queries. Either loop has two stages. In the unmasked stage every query sees
every key, so nothing is compared. The masked stage has the tiles that the diagonal cuts and, among
tiles of keys, the one that extends beyond the last key. Tiles in which no query sees any key are in
neither.

`diagonal` must lie between -num_queries and num_keys: values beyond these bounds are equivalent to
the nearer one, and within them no 32-bit sum overflows.
"""

# ruff: noqa: N803 - compile-time constants of kernels are written in capitals.

import triton
import triton.language as tl


@triton.jit
def own_tile(num_queries, num_heads, BLOCK: tl.constexpr, LAST_FIRST: tl.constexpr):
    """Returns the first query of this program's tile, and its matrix, sequence and head.

    A head's tiles are neighbours, so that its keys and values stay in the cache. With `LAST_FIRST`,
    tiles that see the most keys start first, so that no long one is left over at the end.
    """
    num_tiles = tl.cdiv(num_queries, BLOCK)
    program = tl.program_id(0)
    tile = program % num_tiles
    if LAST_FIRST:
        tile = num_tiles - 1 - tile
    first_query = tile * BLOCK
    matrix = program // num_tiles
    batch = (matrix // num_heads).to(tl.int64)
    head = (matrix % num_heads).to(tl.int64)
    return first_query, matrix, batch, head


@triton.jit
def key_stages(
    first_query, num_queries, num_keys, diagonal,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """Returns the ends of a query tile's two stages: unmasked from zero, then masked."""
    seen_by_all = num_keys
    seen_by_one = num_keys
    if IS_CAUSAL:
        end_of_queries = tl.minimum(first_query + BLOCK_QUERIES, num_queries)
        seen_by_all = tl.minimum(tl.maximum(first_query + diagonal + 1, 0), num_keys)
        seen_by_one = tl.minimum(tl.maximum(end_of_queries + diagonal, 0), num_keys)
    return seen_by_all // BLOCK_KEYS, tl.cdiv(seen_by_one, BLOCK_KEYS)


@triton.jit
def query_stages(
    first_key, num_queries, num_keys, diagonal,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """Returns where a key tile's masked stage begins, and where the unmasked begins and ends.

    The masked stage ends where the unmasked one begins. The unmasked stage may include the tile
    that extends beyond the last query: nonexistent queries contribute nothing.
    """
    num_tiles = tl.cdiv(num_queries, BLOCK_QUERIES)
    masked_begin = 0
    unmasked_begin = 0
    if IS_CAUSAL:
        last_key = tl.minimum(first_key + BLOCK_KEYS, num_keys) - 1
        first_to_see_one = tl.maximum(first_key - diagonal, 0)
        first_to_see_all = tl.maximum(last_key - diagonal, 0)
        masked_begin = tl.where(
            first_to_see_one < num_queries, first_to_see_one // BLOCK_QUERIES, num_tiles
        )
        unmasked_begin = tl.minimum(tl.cdiv(first_to_see_all, BLOCK_QUERIES), num_tiles)
    return masked_begin, unmasked_begin, num_tiles


@triton.jit
def visible_pairs(
    queries, keys, num_keys, diagonal,
    IS_CAUSAL: tl.constexpr, EVEN_KEYS: tl.constexpr,
):  # fmt: skip
    """Returns which pairs of the masked stage are visible; queries and keys must broadcast."""
    if IS_CAUSAL:
        visible = keys <= queries + diagonal
        if not EVEN_KEYS:
            visible = visible & (keys < num_keys)
    else:
        visible = keys < num_keys
    return visible


@triton.jit
def load_tile(
    matrix, start, row_stride, dim_stride, num_rows, head_dim,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN_ROWS: tl.constexpr,
    EVEN_HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Loads rows of one head's matrix from `start` on, with zeros beyond its edges."""
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    # The tile's offset may need 64 bits; offsets inside it do not, and cost half the registers.
    pointers = matrix + start.to(tl.int64) * row_stride + (rows * row_stride + columns * dim_stride)
    if EVEN_ROWS and EVEN_HEAD_DIM:
        tile = tl.load(pointers)
    elif EVEN_HEAD_DIM:
        tile = tl.load(pointers, mask=rows < num_rows - start, other=0.0)
    elif EVEN_ROWS:
        tile = tl.load(pointers, mask=columns < head_dim, other=0.0)
    else:
        inside = (rows < num_rows - start) & (columns < head_dim)
        tile = tl.load(pointers, mask=inside, other=0.0)
    return tile


@triton.jit
def store_tile(
    matrix, tile, start, row_stride, dim_stride, num_rows, head_dim,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN_ROWS: tl.constexpr,
    EVEN_HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Stores a tile in the matrix's dtype, except for the part beyond its edges."""
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    pointers = matrix + start.to(tl.int64) * row_stride + (rows * row_stride + columns * dim_stride)
    tile = tile.to(matrix.dtype.element_ty)
    if EVEN_ROWS and EVEN_HEAD_DIM:
        tl.store(pointers, tile)
    else:
        tl.store(pointers, tile, mask=(rows < num_rows - start) & (columns < head_dim))


@triton.jit
def load_row_values(
    values, start, num_rows, beyond,
    ROWS: tl.constexpr, EVEN_ROWS: tl.constexpr,
):  # fmt: skip
    """Loads one number for each row from `start` on, and `beyond` for rows that do not exist."""
    rows = start + tl.arange(0, ROWS)
    if EVEN_ROWS:
        loaded = tl.load(values + rows)
    else:
        loaded = tl.load(values + rows, mask=rows < num_rows, other=beyond)
    return loaded
