"""Attention on its own, one head per sequence: its FLOPs, and its memory.

B sequences of N tokens and heads of width D; a *vector* is B N D numbers in the dtype of the
inputs, and a is what a sum takes: four bytes, or eight for inputs in float64.

FLOPs. Forward multiplies twice, queries with keys and probabilities with values, 2 D operations
for every query and key that meet: 4 B N² D, and with a causal mask N (N + 1) / 2 pairs instead of
N². Backward multiplies five times, once to get the scores back: 2.5 times that. Every
implementation is credited with these, whatever it does: one that stores its scores does not
recompute them, and one that masks them computes those that it hides.

Saved for backward. Naive attention keeps query, key, value and the B N² probabilities, in dtypes
below float32 once as softmax made them and once as they are multiplied, and with a causal mask its
N² flags. The others keep query, key, value, output, and one number of a bytes per query:

    naive     3 vectors + B N² a  (+ B N² numbers)  (+ N² bytes)
    others    4 vectors + B N a

The peak of tiled attention, forward and backward, for contiguous inputs. The three inputs, the
output's gradient, the output and three gradients are 8 vectors. Backward computes H = min(8, B)
sequences at a time, R = min(256, N) queries by S = min(N, 2²⁰ / 256 H) keys, and needs two tiles of
H R S numbers. Beside them lie T = H R D numbers for every copy of a tile's queries and H R for
every number per query, of this tile and the last:

    float32   8 vectors + B N a + 2 H R S a + max(3 T + 3 H R, 2 T + 2 H R + mask / a) a + a
    lower     the same with max(5 T + 2 H R + 3, 3 T + 2 H R + mask / a), and keys, values and the
              sums of their gradients in float32: 4 H N D a more

The mask of a causal tile is R (R - 1) bytes. From two tiles of queries, 512 tokens, on, this is
exact to the byte; shorter sequences take up to one T and one H R less. Tests count both.
"""

import dataclasses

from paceline.core.specs import AttentionKind, BatchShape

_FLOAT32_BYTES = 4
# The tiles of `paceline.kernels.attention.tiled`, which this room may not import.
_TILE_HEADS = 8
_TILE_QUERIES = 256
_TILE_SCORES = 2**20
# The scale, which torch makes a number of each of two formats while it multiplies.
_SCALE_BYTES = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionFlops:
    """Operations of both passes."""

    forward: int
    """FLOPs of the two matmuls of forward."""
    backward: int
    """FLOPs of the five matmuls of backward."""

    @property
    def total(self) -> int:
        """Operations of one forward and one backward pass."""
        return self.forward + self.backward


def visible_pairs(length: int, *, causal: bool) -> int:
    """Returns how many pairs of a query and a key see each other."""
    return length * (length + 1) // 2 if causal else length**2


def attention_flops(batch: BatchShape, head_dim: int, *, causal: bool) -> AttentionFlops:
    """Counts the matmul FLOPs of the pairs that see each other, scores recomputed in backward.

    Args:
        batch: Sequences of a pass, and their length.
        head_dim: Width of a head.
        causal: Whether a query sees only the keys up to its own position.
    """
    num_pairs = batch.num_sequences * visible_pairs(batch.context_length, causal=causal)
    one_product = 2 * num_pairs * head_dim
    return AttentionFlops(forward=2 * one_product, backward=5 * one_product)


def attention_saved_bytes(
    implementation: AttentionKind,
    batch: BatchShape,
    head_dim: int,
    element_bytes: int,
    *,
    causal: bool,
) -> int:
    """Returns what autograd keeps from forward to backward, inputs included; not compiled.

    Args:
        implementation: naive, which stores all scores, or one that does not.
        batch: Sequences of a pass, and their length.
        head_dim: Width of a head.
        element_bytes: Bytes of one number.
        causal: Whether a mask is kept beside stored scores.
    """
    vector = batch.tokens_per_pass * head_dim * element_bytes
    sum_bytes = _sum_bytes(element_bytes)
    if implementation != "naive":
        return 4 * vector + batch.tokens_per_pass * sum_bytes
    bytes_per_score = sum_bytes + (element_bytes if element_bytes < sum_bytes else 0)
    flags = batch.context_length**2 if causal else 0
    num_scores = batch.tokens_per_pass * batch.context_length
    return 3 * vector + num_scores * bytes_per_score + flags


def tiled_attention_peak_bytes(
    batch: BatchShape, head_dim: int, element_bytes: int, *, causal: bool
) -> int:
    """Returns the most that one forward and backward pass of tiles holds, inputs included.

    `batch`, `head_dim` and `element_bytes` are those of `attention_saved_bytes`; where `causal`,
    tiles above the diagonal are left out.
    """
    sum_bytes = _sum_bytes(element_bytes)
    num_together = min(batch.num_sequences, _TILE_HEADS)
    num_queries = min(batch.context_length, _TILE_QUERIES)
    num_keys = min(batch.context_length, _TILE_SCORES // (num_together * _TILE_QUERIES))
    scores = num_together * num_queries * num_keys * sum_bytes
    per_query = num_together * num_queries * sum_bytes
    queries = per_query * head_dim
    mask = num_queries * (num_queries - 1) if causal else 0
    if element_bytes == sum_bytes:
        copies = 0
        of_queries = max(3 * queries + 3 * per_query, 2 * queries + 2 * per_query + mask)
    else:
        copies = 4 * num_together * batch.context_length * head_dim * sum_bytes
        of_queries = max(
            5 * queries + 2 * per_query + _SCALE_BYTES, 3 * queries + 2 * per_query + mask
        )
    ends = _ends_bytes(batch, head_dim, element_bytes)
    # The gradient of the logarithms, which there is none of, is one zero.
    return ends + 2 * scores + of_queries + copies + sum_bytes


def minimum_attention_bytes(
    implementation: AttentionKind,
    batch: BatchShape,
    head_dim: int,
    element_bytes: int,
    *,
    compiled: bool,
) -> int:
    """Returns what both passes need at the very least.

    Where scores are stored, the probabilities, their gradient and that of the scores exist
    together in backward, beside query, key, value, output, its gradient and the first input's. A
    compiled backward may write the scores' gradient over that of the probabilities. Where they
    are not, inputs, output and the gradients of all four are there in the end, and one number per
    query.

    `implementation`, `batch`, `head_dim` and `element_bytes` are those of `attention_saved_bytes`;
    `compiled` says whether torch.compile may reuse memory in backward.
    """
    if implementation != "naive":
        return _ends_bytes(batch, head_dim, element_bytes)
    scores = batch.tokens_per_pass * batch.context_length * element_bytes
    vectors = batch.tokens_per_pass * head_dim * element_bytes
    return (2 if compiled else 3) * scores + (4 if compiled else 6) * vectors


def _ends_bytes(batch: BatchShape, head_dim: int, element_bytes: int) -> int:
    """Returns what goes into both passes and comes out of them."""
    vectors = 8 * batch.tokens_per_pass * head_dim * element_bytes
    return vectors + batch.tokens_per_pass * _sum_bytes(element_bytes)


def _sum_bytes(element_bytes: int) -> int:
    return max(element_bytes, _FLOAT32_BYTES)
