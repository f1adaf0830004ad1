"""The backward kernels of FlashAttention-2 (Dao 2023), in Triton.

With P the weights, dP = dO Vᵀ and dS = P (dP - delta), the gradients are dV = Pᵀ dO, dK = dSᵀ Q and
dQ = dS K, the latter two times the scale. P is recomputed from the scores and the saved
log-sum-exp. `attention_delta_kernel` computes delta, one number for each query. One kernel then
owns tiles of keys and iterates over queries; another owns tiles of queries and iterates over keys.
The scores are computed twice, but no two programs accumulate into the same memory, so the result is
bitwise identical in every run.
"""

# ruff: noqa: N803 - compile-time constants of kernels are written in capitals.

import triton
import triton.language as tl

from paceline.kernels.attention.triton.schedule import (
    key_stages,
    load_row_values,
    load_tile,
    own_tile,
    query_stages,
    store_tile,
    visible_pairs,
)

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["num_queries"])
def attention_delta_kernel(
    output, output_batch_stride, output_head_stride, output_row_stride, output_dim_stride,
    output_gradient,
    output_gradient_batch_stride, output_gradient_head_stride,
    output_gradient_row_stride, output_gradient_dim_stride,
    lse, lse_gradient, delta, num_queries, num_heads, head_dim,
    BLOCK_QUERIES: tl.constexpr, BLOCK_HEAD_DIM: tl.constexpr, EVEN_QUERIES: tl.constexpr,
    EVEN_HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Computes delta = rowsum(dO * O) - the gradient of lse, for one tile of queries."""
    first_query, matrix, batch, head = own_tile(num_queries, num_heads, BLOCK_QUERIES, False)
    output += batch * output_batch_stride + head * output_head_stride
    output_gradient += batch * output_gradient_batch_stride + head * output_gradient_head_stride
    row_offset = matrix.to(tl.int64) * num_queries

    output_tile = load_tile(
        *(output, first_query, output_row_stride, output_dim_stride, num_queries, head_dim),
        *(BLOCK_QUERIES, BLOCK_HEAD_DIM, EVEN_QUERIES, EVEN_HEAD_DIM),
    )
    gradient_tile = load_tile(
        *(output_gradient, first_query, output_gradient_row_stride, output_gradient_dim_stride),
        *(num_queries, head_dim, BLOCK_QUERIES, BLOCK_HEAD_DIM, EVEN_QUERIES, EVEN_HEAD_DIM),
    )
    row_delta = tl.sum(output_tile.to(tl.float32) * gradient_tile.to(tl.float32), 1)
    if lse_gradient is not None:
        logarithm = load_row_values(
            lse + row_offset, first_query, num_queries, 0.0, BLOCK_QUERIES, EVEN_QUERIES
        )
        gradient = load_row_values(
            lse_gradient + row_offset, first_query, num_queries, 0.0, BLOCK_QUERIES, EVEN_QUERIES
        )
        # The lse of a query that sees nothing is constant, so its gradient is ignored.
        row_delta -= tl.where(logarithm == float("-inf"), 0.0, gradient)
    queries = first_query + tl.arange(0, BLOCK_QUERIES)
    if EVEN_QUERIES:
        tl.store(delta + row_offset + queries, row_delta)
    else:
        tl.store(delta + row_offset + queries, row_delta, mask=queries < num_queries)


@triton.jit
def _gather_from_queries(
    key_gradient, value_gradient, key, value, first_key,
    query_matrix, query_head_stride, query_row_stride, query_dim_stride,
    output_gradient_matrix, output_gradient_head_stride,
    output_gradient_row_stride, output_gradient_dim_stride,
    lse, delta, begin, end, group, scale_log2, num_queries, diagonal, head_dim,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_HEAD_DIM: tl.constexpr,
    MASKED: tl.constexpr, IS_GROUPED: tl.constexpr, EVEN_QUERIES: tl.constexpr,
    EVEN_HEAD_DIM: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the contributions of the query tiles from begin to end to a key tile's gradients.

    One loop covers the tiles of all heads that share the keys: a nested loop over the heads would
    need more registers than there are.

    Scores are stored keys by queries, so that no matmul needs them transposed. Keys beyond the last
    are not masked: their gradients go to rows that are never stored. Queries beyond the last have
    an infinite log-sum-exp, hence weights of zero.
    """
    keys = first_key + tl.arange(0, BLOCK_KEYS)
    num_tiles = tl.maximum(end - begin, 0)
    num_steps = num_tiles
    if IS_GROUPED:
        num_steps *= group
    for step in range(num_steps):
        tile = begin + step
        query_head = query_matrix
        output_gradient_head = output_gradient_matrix
        head_lse = lse
        head_delta = delta
        if IS_GROUPED:
            tile = begin + step % num_tiles
            member = (step // num_tiles).to(tl.int64)
            query_head += member * query_head_stride
            output_gradient_head += member * output_gradient_head_stride
            head_lse += member * num_queries
            head_delta += member * num_queries
        start = tile * BLOCK_QUERIES
        query = load_tile(
            *(query_head, start, query_row_stride, query_dim_stride, num_queries, head_dim),
            *(BLOCK_QUERIES, BLOCK_HEAD_DIM, EVEN_QUERIES, EVEN_HEAD_DIM),
        )
        logarithm = load_row_values(
            head_lse, start, num_queries, float("inf"), BLOCK_QUERIES, EVEN_QUERIES
        )
        scores = tl.dot(key, tl.trans(query), input_precision=INPUT_PRECISION)
        weights = tl.exp2(tl.fma(scores, scale_log2, -(logarithm * LOG2_E)[None, :]))
        if MASKED:
            queries = start + tl.arange(0, BLOCK_QUERIES)
            visible = visible_pairs(queries[None, :], keys[:, None], 0, diagonal, True, True)
            weights = tl.where(visible, weights, 0.0)
        output_gradient = load_tile(
            *(output_gradient_head, start),
            *(output_gradient_row_stride, output_gradient_dim_stride, num_queries, head_dim),
            *(BLOCK_QUERIES, BLOCK_HEAD_DIM, EVEN_QUERIES, EVEN_HEAD_DIM),
        )
        value_gradient = tl.dot(
            weights.to(output_gradient.dtype),
            output_gradient,
            value_gradient,
            input_precision=INPUT_PRECISION,
        )
        row_delta = load_row_values(
            head_delta, start, num_queries, 0.0, BLOCK_QUERIES, EVEN_QUERIES
        )
        weight_gradient = tl.dot(value, tl.trans(output_gradient), input_precision=INPUT_PRECISION)
        score_gradient = weights * (weight_gradient - row_delta[None, :])
        key_gradient = tl.dot(
            score_gradient.to(query.dtype), query, key_gradient, input_precision=INPUT_PRECISION
        )
    return key_gradient, value_gradient


@triton.jit(do_not_specialize=["num_queries", "num_keys", "diagonal"])
def attention_key_value_gradient_kernel(
    query, query_batch_stride, query_head_stride, query_row_stride, query_dim_stride,
    key, key_batch_stride, key_head_stride, key_row_stride, key_dim_stride,
    value, value_batch_stride, value_head_stride, value_row_stride, value_dim_stride,
    output_gradient,
    output_gradient_batch_stride, output_gradient_head_stride,
    output_gradient_row_stride, output_gradient_dim_stride,
    lse, delta,
    key_gradient,
    key_gradient_batch_stride, key_gradient_head_stride,
    key_gradient_row_stride, key_gradient_dim_stride,
    value_gradient,
    value_gradient_batch_stride, value_gradient_head_stride,
    value_gradient_row_stride, value_gradient_dim_stride,
    scale, scale_log2, num_queries, num_keys, diagonal, num_heads, group, head_dim,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_HEAD_DIM: tl.constexpr,
    IS_CAUSAL: tl.constexpr, EVEN_QUERIES: tl.constexpr, EVEN_KEYS: tl.constexpr,
    EVEN_HEAD_DIM: tl.constexpr, IS_GROUPED: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of one tile of keys and values, from all heads that share it."""
    # Most queries see the first keys, so the heaviest tiles already start first.
    num_tiles = tl.cdiv(num_keys, BLOCK_KEYS)
    program = tl.program_id(0)
    first_key = program % num_tiles * BLOCK_KEYS
    matrix = program // num_tiles
    num_key_heads = num_heads // group
    batch = (matrix // num_key_heads).to(tl.int64)
    key_head = (matrix % num_key_heads).to(tl.int64)
    key += batch * key_batch_stride + key_head * key_head_stride
    value += batch * value_batch_stride + key_head * value_head_stride
    key_gradient += batch * key_gradient_batch_stride + key_head * key_gradient_head_stride
    value_gradient += batch * value_gradient_batch_stride + key_head * value_gradient_head_stride

    key_tile = load_tile(
        *(key, first_key, key_row_stride, key_dim_stride, num_keys, head_dim),
        *(BLOCK_KEYS, BLOCK_HEAD_DIM, EVEN_KEYS, EVEN_HEAD_DIM),
    )
    value_tile = load_tile(
        *(value, first_key, value_row_stride, value_dim_stride, num_keys, head_dim),
        *(BLOCK_KEYS, BLOCK_HEAD_DIM, EVEN_KEYS, EVEN_HEAD_DIM),
    )
    of_key = tl.zeros((BLOCK_KEYS, BLOCK_HEAD_DIM), tl.float32)
    of_value = tl.zeros((BLOCK_KEYS, BLOCK_HEAD_DIM), tl.float32)
    masked_begin, unmasked_begin, unmasked_end = query_stages(
        first_key, num_queries, num_keys, diagonal, BLOCK_QUERIES, BLOCK_KEYS, IS_CAUSAL
    )
    first_head = key_head * group
    query += batch * query_batch_stride + first_head * query_head_stride
    output_gradient += (
        batch * output_gradient_batch_stride + first_head * output_gradient_head_stride
    )
    row_offset = (batch * num_heads + first_head) * num_queries
    if IS_CAUSAL:
        of_key, of_value = _gather_from_queries(
            *(of_key, of_value, key_tile, value_tile, first_key),
            *(query, query_head_stride, query_row_stride, query_dim_stride),
            *(output_gradient, output_gradient_head_stride),
            *(output_gradient_row_stride, output_gradient_dim_stride),
            *(lse + row_offset, delta + row_offset, masked_begin, unmasked_begin, group),
            *(scale_log2, num_queries, diagonal, head_dim),
            *(BLOCK_QUERIES, BLOCK_KEYS, BLOCK_HEAD_DIM),
            *(True, IS_GROUPED, EVEN_QUERIES, EVEN_HEAD_DIM, INPUT_PRECISION),
        )
    of_key, of_value = _gather_from_queries(
        *(of_key, of_value, key_tile, value_tile, first_key),
        *(query, query_head_stride, query_row_stride, query_dim_stride),
        *(output_gradient, output_gradient_head_stride),
        *(output_gradient_row_stride, output_gradient_dim_stride),
        *(lse + row_offset, delta + row_offset, unmasked_begin, unmasked_end, group),
        *(scale_log2, num_queries, diagonal, head_dim),
        *(BLOCK_QUERIES, BLOCK_KEYS, BLOCK_HEAD_DIM),
        *(False, IS_GROUPED, EVEN_QUERIES, EVEN_HEAD_DIM, INPUT_PRECISION),
    )
    store_tile(
        *(key_gradient, of_key * scale, first_key),
        *(key_gradient_row_stride, key_gradient_dim_stride, num_keys, head_dim),
        *(BLOCK_KEYS, BLOCK_HEAD_DIM, EVEN_KEYS, EVEN_HEAD_DIM),
    )
    store_tile(
        *(value_gradient, of_value, first_key),
        *(value_gradient_row_stride, value_gradient_dim_stride, num_keys, head_dim),
        *(BLOCK_KEYS, BLOCK_HEAD_DIM, EVEN_KEYS, EVEN_HEAD_DIM),
    )


@triton.jit
def _gather_from_keys(
    query_gradient, query, output_gradient, logarithm, row_delta, first_query,
    key_matrix, key_row_stride, key_dim_stride,
    value_matrix, value_row_stride, value_dim_stride,
    begin, end, scale_log2, num_keys, diagonal, head_dim,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_HEAD_DIM: tl.constexpr,
    IS_CAUSAL: tl.constexpr, MASKED: tl.constexpr, EVEN_KEYS: tl.constexpr,
    EVEN_HEAD_DIM: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the contributions of the key tiles from begin to end to a query tile's gradient."""
    queries = first_query + tl.arange(0, BLOCK_QUERIES)
    for tile in range(begin, end):
        start = tile * BLOCK_KEYS
        key = load_tile(
            *(key_matrix, start, key_row_stride, key_dim_stride, num_keys, head_dim),
            *(BLOCK_KEYS, BLOCK_HEAD_DIM, EVEN_KEYS or not MASKED, EVEN_HEAD_DIM),
        )
        value = load_tile(
            *(value_matrix, start, value_row_stride, value_dim_stride, num_keys, head_dim),
            *(BLOCK_KEYS, BLOCK_HEAD_DIM, EVEN_KEYS or not MASKED, EVEN_HEAD_DIM),
        )
        scores = tl.dot(query, tl.trans(key), input_precision=INPUT_PRECISION)
        weights = tl.exp2(tl.fma(scores, scale_log2, -(logarithm * LOG2_E)[:, None]))
        if MASKED:
            keys = start + tl.arange(0, BLOCK_KEYS)
            visible = visible_pairs(
                queries[:, None], keys[None, :], num_keys, diagonal, IS_CAUSAL, EVEN_KEYS
            )
            weights = tl.where(visible, weights, 0.0)
        weight_gradient = tl.dot(output_gradient, tl.trans(value), input_precision=INPUT_PRECISION)
        score_gradient = weights * (weight_gradient - row_delta[:, None])
        query_gradient = tl.dot(
            score_gradient.to(key.dtype), key, query_gradient, input_precision=INPUT_PRECISION
        )
    return query_gradient


@triton.jit(do_not_specialize=["num_queries", "num_keys", "diagonal"])
def attention_query_gradient_kernel(
    query, query_batch_stride, query_head_stride, query_row_stride, query_dim_stride,
    key, key_batch_stride, key_head_stride, key_row_stride, key_dim_stride,
    value, value_batch_stride, value_head_stride, value_row_stride, value_dim_stride,
    output_gradient,
    output_gradient_batch_stride, output_gradient_head_stride,
    output_gradient_row_stride, output_gradient_dim_stride,
    lse, delta,
    query_gradient,
    query_gradient_batch_stride, query_gradient_head_stride,
    query_gradient_row_stride, query_gradient_dim_stride,
    scale, scale_log2, num_queries, num_keys, diagonal, num_heads, group, head_dim,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_HEAD_DIM: tl.constexpr,
    IS_CAUSAL: tl.constexpr, EVEN_QUERIES: tl.constexpr, EVEN_KEYS: tl.constexpr,
    EVEN_HEAD_DIM: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes the gradient of one tile of queries of one head."""
    first_query, matrix, batch, head = own_tile(num_queries, num_heads, BLOCK_QUERIES, True)
    query += batch * query_batch_stride + head * query_head_stride
    key += batch * key_batch_stride + head // group * key_head_stride
    value += batch * value_batch_stride + head // group * value_head_stride
    output_gradient += batch * output_gradient_batch_stride + head * output_gradient_head_stride
    query_gradient += batch * query_gradient_batch_stride + head * query_gradient_head_stride
    row_offset = matrix.to(tl.int64) * num_queries

    query_tile = load_tile(
        *(query, first_query, query_row_stride, query_dim_stride, num_queries, head_dim),
        *(BLOCK_QUERIES, BLOCK_HEAD_DIM, EVEN_QUERIES, EVEN_HEAD_DIM),
    )
    gradient_tile = load_tile(
        *(output_gradient, first_query, output_gradient_row_stride, output_gradient_dim_stride),
        *(num_queries, head_dim, BLOCK_QUERIES, BLOCK_HEAD_DIM, EVEN_QUERIES, EVEN_HEAD_DIM),
    )
    logarithm = load_row_values(
        lse + row_offset, first_query, num_queries, float("inf"), BLOCK_QUERIES, EVEN_QUERIES
    )
    row_delta = load_row_values(
        delta + row_offset, first_query, num_queries, 0.0, BLOCK_QUERIES, EVEN_QUERIES
    )
    of_query = tl.zeros((BLOCK_QUERIES, BLOCK_HEAD_DIM), tl.float32)
    unmasked_end, masked_end = key_stages(
        first_query, num_queries, num_keys, diagonal, BLOCK_QUERIES, BLOCK_KEYS, IS_CAUSAL
    )
    of_query = _gather_from_keys(
        *(of_query, query_tile, gradient_tile, logarithm, row_delta, first_query),
        *(key, key_row_stride, key_dim_stride, value, value_row_stride, value_dim_stride),
        *(0, unmasked_end, scale_log2, num_keys, diagonal, head_dim),
        *(BLOCK_QUERIES, BLOCK_KEYS, BLOCK_HEAD_DIM, IS_CAUSAL),
        *(False, EVEN_KEYS, EVEN_HEAD_DIM, INPUT_PRECISION),
    )
    if IS_CAUSAL or not EVEN_KEYS:
        of_query = _gather_from_keys(
            *(of_query, query_tile, gradient_tile, logarithm, row_delta, first_query),
            *(key, key_row_stride, key_dim_stride, value, value_row_stride, value_dim_stride),
            *(unmasked_end, masked_end, scale_log2, num_keys, diagonal, head_dim),
            *(BLOCK_QUERIES, BLOCK_KEYS, BLOCK_HEAD_DIM, IS_CAUSAL),
            *(True, EVEN_KEYS, EVEN_HEAD_DIM, INPUT_PRECISION),
        )
    store_tile(
        *(query_gradient, of_query * scale, first_query),
        *(query_gradient_row_stride, query_gradient_dim_stride, num_queries, head_dim),
        *(BLOCK_QUERIES, BLOCK_HEAD_DIM, EVEN_QUERIES, EVEN_HEAD_DIM),
    )
