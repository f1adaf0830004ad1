"""The forward kernel of FlashAttention-2 (Dao 2023), in Triton.

A program owns one tile of queries and visits the tiles of keys that it sees, first those that are
fully visible. For each query it keeps the largest score so far and, relative to it, the sum of
exponentials and the weighted sum of values; the scores themselves never leave the chip. Besides the
output, backward needs only the log-sum-exp.

Exponentials are powers of two, with log2(e) folded into the scale. Matmuls accumulate in float32;
all numbers except the inputs of matmuls are float32.
"""

# ruff: noqa: N803 - compile-time constants of kernels are written in capitals.

import triton
import triton.language as tl

from paceline.kernels.attention.triton.schedule import (
    key_stages,
    load_tile,
    own_tile,
    store_tile,
    visible_pairs,
)

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _attend(
    weighted_values, row_sum, row_max, query, first_query,
    key_matrix, key_row_stride, key_dim_stride,
    value_matrix, value_row_stride, value_dim_stride,
    begin, end, scale_log2, num_keys, diagonal, head_dim,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_HEAD_DIM: tl.constexpr,
    IS_CAUSAL: tl.constexpr, MASKED: tl.constexpr, EVEN_KEYS: tl.constexpr,
    EVEN_HEAD_DIM: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    """Accumulates the key tiles from begin to end."""
    queries = first_query + tl.arange(0, BLOCK_QUERIES)
    for tile in range(begin, end):
        start = tile * BLOCK_KEYS
        key = load_tile(
            *(key_matrix, start, key_row_stride, key_dim_stride, num_keys, head_dim),
            *(BLOCK_KEYS, BLOCK_HEAD_DIM, EVEN_KEYS or not MASKED, EVEN_HEAD_DIM),
        )
        scores = tl.dot(query, tl.trans(key), input_precision=INPUT_PRECISION)
        if MASKED:
            keys = start + tl.arange(0, BLOCK_KEYS)
            visible = visible_pairs(
                queries[:, None], keys[None, :], num_keys, diagonal, IS_CAUSAL, EVEN_KEYS
            )
            scores = tl.where(visible, scores * scale_log2, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            # For a query that has seen nothing yet, -inf minus -inf would be NaN.
            reference = tl.where(new_max == float("-inf"), 0.0, new_max)
            weights = tl.exp2(scores - reference[:, None])
            shrink = tl.exp2(row_max - reference)
        else:
            # The scale is not negative, so the largest product is the largest score, and scaling
            # and subtracting are one instruction.
            new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
            weights = tl.exp2(tl.fma(scores, scale_log2, -new_max[:, None]))
            shrink = tl.exp2(row_max - new_max)
        row_max = new_max
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        value = load_tile(
            *(value_matrix, start, value_row_stride, value_dim_stride, num_keys, head_dim),
            *(BLOCK_KEYS, BLOCK_HEAD_DIM, EVEN_KEYS or not MASKED, EVEN_HEAD_DIM),
        )
        weighted_values = tl.dot(
            weights.to(value.dtype),
            value,
            weighted_values * shrink[:, None],
            input_precision=INPUT_PRECISION,
        )
    return weighted_values, row_sum, row_max


@triton.jit(do_not_specialize=["num_queries", "num_keys", "diagonal"])
def attention_forward_kernel(
    query, query_batch_stride, query_head_stride, query_row_stride, query_dim_stride,
    key, key_batch_stride, key_head_stride, key_row_stride, key_dim_stride,
    value, value_batch_stride, value_head_stride, value_row_stride, value_dim_stride,
    output, output_batch_stride, output_head_stride, output_row_stride, output_dim_stride,
    lse, scale_log2, num_queries, num_keys, diagonal, num_heads, group, head_dim,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_HEAD_DIM: tl.constexpr,
    IS_CAUSAL: tl.constexpr, EVEN_QUERIES: tl.constexpr, EVEN_KEYS: tl.constexpr,
    EVEN_HEAD_DIM: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes the output and the log-sum-exp of one tile of queries of one head."""
    first_query, matrix, batch, head = own_tile(num_queries, num_heads, BLOCK_QUERIES, True)
    query += batch * query_batch_stride + head * query_head_stride
    key += batch * key_batch_stride + head // group * key_head_stride
    value += batch * value_batch_stride + head // group * value_head_stride
    output += batch * output_batch_stride + head * output_head_stride
    lse += matrix.to(tl.int64) * num_queries

    query_tile = load_tile(
        *(query, first_query, query_row_stride, query_dim_stride, num_queries, head_dim),
        *(BLOCK_QUERIES, BLOCK_HEAD_DIM, EVEN_QUERIES, EVEN_HEAD_DIM),
    )
    weighted_values = tl.zeros((BLOCK_QUERIES, BLOCK_HEAD_DIM), tl.float32)
    row_sum = tl.zeros((BLOCK_QUERIES,), tl.float32)
    row_max = tl.full((BLOCK_QUERIES,), float("-inf"), tl.float32)
    unmasked_end, masked_end = key_stages(
        first_query, num_queries, num_keys, diagonal, BLOCK_QUERIES, BLOCK_KEYS, IS_CAUSAL
    )
    weighted_values, row_sum, row_max = _attend(
        *(weighted_values, row_sum, row_max, query_tile, first_query),
        *(key, key_row_stride, key_dim_stride, value, value_row_stride, value_dim_stride),
        *(0, unmasked_end, scale_log2, num_keys, diagonal, head_dim),
        *(BLOCK_QUERIES, BLOCK_KEYS, BLOCK_HEAD_DIM, IS_CAUSAL),
        *(False, EVEN_KEYS, EVEN_HEAD_DIM, INPUT_PRECISION),
    )
    if IS_CAUSAL or not EVEN_KEYS:
        weighted_values, row_sum, row_max = _attend(
            *(weighted_values, row_sum, row_max, query_tile, first_query),
            *(key, key_row_stride, key_dim_stride, value, value_row_stride, value_dim_stride),
            *(unmasked_end, masked_end, scale_log2, num_keys, diagonal, head_dim),
            *(BLOCK_QUERIES, BLOCK_KEYS, BLOCK_HEAD_DIM, IS_CAUSAL),
            *(True, EVEN_KEYS, EVEN_HEAD_DIM, INPUT_PRECISION),
        )
    # A query that sees nothing has a sum of zero: its output is zero, its log-sum-exp -inf.
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    store_tile(
        *(output, weighted_values / row_sum[:, None]),
        *(first_query, output_row_stride, output_dim_stride, num_queries, head_dim),
        *(BLOCK_QUERIES, BLOCK_HEAD_DIM, EVEN_QUERIES, EVEN_HEAD_DIM),
    )
    queries = first_query + tl.arange(0, BLOCK_QUERIES)
    logarithms = (row_max + tl.log2(row_sum)) * LN_2
    if EVEN_QUERIES:
        tl.store(lse + queries, logarithms)
    else:
        tl.store(lse + queries, logarithms, mask=queries < num_queries)
