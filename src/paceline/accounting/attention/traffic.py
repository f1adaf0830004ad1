"""FLOPs of attention kernels, and bounds on the bytes that they move.

Each matmul costs 2 d FLOPs per visible query-key pair, where d is the head width. Forward has two
(scores, output), the key-value gradient kernel four (scores, dV, dP, dK), the query gradient kernel
three (scores, dP, dQ). Backward thus costs 3.5 times forward; a kernel that accumulates dQ with
atomics costs 2.5 times. The difference is the price of gradients that are identical in every run.

At best, every tensor moves between memory and chip once, because the cache serves all programs that
share data. At worst, every read misses the cache: a kernel that owns tiles of queries rereads keys
and values for each tile, and vice versa. Actual performance lies between the two, or below both if
something else is the bottleneck: this is a ceiling, not a prediction.
"""

import dataclasses
from typing import Literal

from paceline.accounting.attention.cost import visible_pairs

AttentionKernel = Literal["forward", "delta", "key_value_gradient", "query_gradient"]

_FLOAT32_BYTES = 4
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
