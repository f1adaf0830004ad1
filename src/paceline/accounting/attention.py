"""FLOPs, memory and kernels of attention by itself, with one head per sequence.

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

Kernels. Each matmul costs 2 D FLOPs per visible pair. Forward has two (scores, output), the
key-value gradient kernel four (scores, dV, dP, dK), the query gradient kernel three (scores, dP,
dQ). Backward thus costs 3.5 times forward; a kernel that accumulates dQ with atomics costs 2.5
times. The difference is the price of gradients that are identical in every run. At best, every
tensor moves between memory and chip once; at worst, every read misses the cache, and a kernel that
owns tiles of queries rereads keys and values for each tile, and vice versa. This is a ceiling, not
a prediction.

Occupancy. Blocks run concurrently until registers, shared memory or warp slots are used up.
Registers are allocated to whole warps in fixed portions, and NVIDIA's driver reserves some shared
memory for every block. Resources come from NVIDIA's CUDA C++ Programming Guide, table "Technical
Specifications per Compute Capability", and AMD's CDNA3 Instruction Set Architecture reference
guide. An unknown architecture is an error, never a guess.
"""

import dataclasses
from typing import Literal

from paceline.core.errors import HardwareError
from paceline.core.specs import AttentionKind, BatchShape
from paceline.core.units import KIB

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


AttentionKernel = Literal["forward", "delta", "key_value_gradient", "query_gradient"]

# Number of matmuls, and least memory traffic: tensors, and numbers per query.
_KERNELS: dict[AttentionKernel, tuple[int, int, int]] = {
    "forward": (2, 4, 1),
    "delta": (0, 2, 1),
    "key_value_gradient": (4, 6, 2),
    "query_gradient": (3, 5, 2),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelWork:
    """FLOPs and memory traffic of one kernel for one head."""

    flops: float
    best_bytes: float
    worst_bytes: float

    @property
    def best_intensity(self) -> float:
        """FLOPs per byte if every byte moves once."""
        return self.flops / self.best_bytes

    @property
    def worst_intensity(self) -> float:
        """FLOPs per byte if every read misses the cache."""
        return self.flops / self.worst_bytes


def kernel_work(
    kernel: AttentionKernel,
    *,
    length: int,
    head_dim: int,
    element_bytes: int,
    causal: bool,
    block_queries: int,
    block_keys: int,
) -> KernelWork:
    """Returns the work of one kernel for one head with `length` queries and `length` keys."""
    num_matmuls, num_tensors, num_numbers = _KERNELS[kernel]
    row = head_dim * element_bytes
    # Rows that all programs together read of the side that they iterate over.
    keys_read = queries_read = 0
    for begin in range(0, length, block_queries):
        keys_read += min(begin + block_queries, length) if causal else length
    for begin in range(0, length, block_keys):
        queries_read += length - begin if causal else length
    again = 0
    if kernel == "key_value_gradient":
        again = (queries_read - length) * (2 * row + 2 * _FLOAT32_BYTES)
    elif kernel != "delta":
        again = (keys_read - length) * 2 * row
    best = length * (num_tensors * row + num_numbers * _FLOAT32_BYTES)
    flops = num_matmuls * 2 * head_dim * visible_pairs(length, causal=causal)
    return KernelWork(flops=flops, best_bytes=best, worst_bytes=best + again)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Multiprocessor:
    """The resources of one multiprocessor (NVIDIA) or compute unit (AMD)."""

    device: str
    """A device in the hardware table that has this multiprocessor."""
    max_warps: int
    max_blocks: int
    shared_bytes: int
    # The defaults are common to all NVIDIA generations.
    warp_size: int = 32
    """Threads that run in lockstep: a warp (NVIDIA) or wavefront (AMD)."""
    registers: int = 65536
    """Number of 32-bit registers, shared by all threads."""
    registers_per_portion: int = 256
    """Registers are allocated to a warp in multiples of this."""
    reserved_bytes_per_block: int = KIB


MULTIPROCESSORS: dict[str, Multiprocessor] = {
    "sm80": Multiprocessor(
        device="a100-sxm-80gb", max_warps=64, max_blocks=32, shared_bytes=164 * KIB
    ),
    "sm86": Multiprocessor(device="rtx-3090", max_warps=48, max_blocks=16, shared_bytes=100 * KIB),
    "sm90": Multiprocessor(device="h100-sxm", max_warps=64, max_blocks=32, shared_bytes=228 * KIB),
    "sm100": Multiprocessor(device="b200-sxm", max_warps=64, max_blocks=32, shared_bytes=228 * KIB),
    # Four SIMD units, each with 512 registers for the 64 lanes of up to 8 wavefronts.
    "gfx942": Multiprocessor(
        device="mi300x",
        max_warps=32,
        max_blocks=32,
        shared_bytes=64 * KIB,
        warp_size=64,
        registers=4 * 512 * 64,
        registers_per_portion=8 * 64,
        reserved_bytes_per_block=0,
    ),
}


def find_multiprocessor(architecture: str) -> Multiprocessor:
    """Returns the limits of an architecture such as sm90."""
    if architecture not in MULTIPROCESSORS:
        known = ", ".join(MULTIPROCESSORS)
        raise HardwareError(f"unknown architecture {architecture!r}; known: {known}")
    return MULTIPROCESSORS[architecture]


def blocks_at_once(
    multiprocessor: Multiprocessor, *, registers: int, shared_bytes: int, num_warps: int
) -> int:
    """Returns how many blocks of a kernel one multiprocessor runs at a time; 0 if none fit.

    Each thread takes `registers`; each block takes `shared_bytes` and `num_warps`.
    """
    portion = multiprocessor.registers_per_portion
    registers_per_warp = -(-registers * multiprocessor.warp_size // portion) * portion
    shared_per_block = shared_bytes + multiprocessor.reserved_bytes_per_block
    return min(
        multiprocessor.max_blocks,
        multiprocessor.max_warps // num_warps,
        multiprocessor.registers // max(registers_per_warp, 1) // num_warps,
        multiprocessor.shared_bytes // max(shared_per_block, 1),
    )


def occupancy(
    multiprocessor: Multiprocessor, *, registers: int, shared_bytes: int, num_warps: int
) -> float:
    """Returns the fraction of warp slots that a kernel's blocks fill."""
    num_blocks = blocks_at_once(
        multiprocessor, registers=registers, shared_bytes=shared_bytes, num_warps=num_warps
    )
    return num_blocks * num_warps / multiprocessor.max_warps
