"""FLOPs and memory of attention by itself, with one head per sequence.

There are B sequences of N tokens, and heads of width D. A *vector* is B N D numbers in the dtype of
the inputs. a is the size of an accumulator: four bytes, or eight for float64 inputs.

FLOPs. Forward has two matmuls, queries by keys and probabilities by values, with 2 D operations per
visible pair of query and key: 4 B N² D in total. With a causal mask, N (N + 1) / 2 pairs replace
N². Backward has five matmuls, one of which recomputes the scores: 2.5 times as much. Every
implementation is credited with these FLOPs, regardless of what it executes: one that stores its
scores does not recompute them, and one that masks scores also computes the hidden ones.

Saved for backward. Naive attention saves query, key, value and the B N² probabilities. Below
float32 it saves the probabilities twice: as softmax returns them, and cast for the matmul. With a
causal mask it also saves N² flags. The others save query, key, value, output, and one number of a
bytes per query:

    naive     3 vectors + B N² a  (+ B N² numbers)  (+ N² bytes)
    others    4 vectors + B N a

Peak of tiled attention, forward and backward, for contiguous inputs. The three inputs, the output's
gradient, the output and three gradients are 8 vectors. Backward computes H = min(8, B) sequences at
a time, R = min(256, N) queries by S = min(N, 2²⁰ / 256 H) keys, and needs two tiles of H R S
numbers. In addition there are T = H R D numbers for every copy of a tile's queries and H R for
every number per query, of the current tile and the previous one:

    float32   8 vectors + B N a + 2 H R S a + max(3 T + 3 H R, 2 T + 2 H R + mask / a) a + a
    lower     the same with max(5 T + 2 H R + 3, 3 T + 2 H R + mask / a), and keys, values and the
              sums of their gradients in float32: 4 H N D a more

The mask of a causal tile is R (R - 1) bytes. With two or more tiles of queries (512 tokens), this
is exact to the byte; shorter sequences take up to one T and one H R less. Tests check both.
"""

import dataclasses

from paceline.core.specs import AttentionKind, BatchShape

_FLOAT32_BYTES = 4
# The tile sizes of `paceline.kernels.attention.tiled`, which this package must not import.
_TILE_HEADS = 8
_TILE_QUERIES = 256
_TILE_SCORES = 2**20
# torch holds the scale as scalars of two dtypes (8 + 4 bytes) while it multiplies.
_SCALE_BYTES = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionFlops:
    """FLOPs of both passes."""

    forward: int
    """FLOPs of the two matmuls of forward."""
    backward: int
    """FLOPs of the five matmuls of backward."""

    @property
    def total(self) -> int:
        """FLOPs of one forward and one backward pass."""
        return self.forward + self.backward


def visible_pairs(length: int, *, causal: bool) -> int:
    """Returns the number of visible query-key pairs."""
    return length * (length + 1) // 2 if causal else length**2


def attention_flops(batch: BatchShape, head_dim: int, *, causal: bool) -> AttentionFlops:
    """Counts the matmul FLOPs of the visible pairs, including the recomputed scores of backward.

    Args:
        batch: Sequences per pass, and their length.
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
    """Returns the bytes that autograd saves for backward in eager mode, inputs included.

    Args:
        implementation: naive stores all scores; the others do not.
        batch: Sequences per pass, and their length.
        head_dim: Width of a head.
        element_bytes: Bytes per input element.
        causal: Whether a mask is saved with the stored scores.
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
    """Returns the peak bytes of a forward and backward pass of tiled attention, inputs included.

    `batch`, `head_dim` and `element_bytes` are those of `attention_saved_bytes`. With `causal`,
    tiles above the diagonal are skipped.
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
    # The missing gradient of the log-sum-exp is one zero, expanded.
    return ends + 2 * scores + of_queries + copies + sum_bytes


def minimum_attention_bytes(
    implementation: AttentionKind,
    batch: BatchShape,
    head_dim: int,
    element_bytes: int,
    *,
    compiled: bool,
) -> int:
    """Returns a lower bound for the peak bytes of both passes.

    If scores are stored, backward holds the probabilities, their gradient and the gradient of the
    scores at the same time, together with query, key, value, output, the output's gradient and the
    first input's gradient. A compiled backward may overwrite the gradient of the probabilities with
    that of the scores. If scores are not stored, inputs, output, the gradients of all four and one
    number per query exist at the end.

    `implementation`, `batch`, `head_dim` and `element_bytes` are those of `attention_saved_bytes`;
    `compiled` says whether torch.compile may reuse memory in backward.
    """
    if implementation != "naive":
        return _ends_bytes(batch, head_dim, element_bytes)
    scores = batch.tokens_per_pass * batch.context_length * element_bytes
    vectors = batch.tokens_per_pass * head_dim * element_bytes
    return (2 if compiled else 3) * scores + (4 if compiled else 6) * vectors


def _ends_bytes(batch: BatchShape, head_dim: int, element_bytes: int) -> int:
    """Returns the bytes of the inputs and results of both passes."""
    vectors = 8 * batch.tokens_per_pass * head_dim * element_bytes
    return vectors + batch.tokens_per_pass * _sum_bytes(element_bytes)


def _sum_bytes(element_bytes: int) -> int:
    return max(element_bytes, _FLOAT32_BYTES)
