"""How many FLOPs an attention kernel needs, and how many bytes it moves, at best and at worst.

Per visible pair of a query and a key, each matmul costs 2 d FLOPs, d being the width of the head:
forward has two (scores, output), the kernel of keys and values four (scores, dV, dP, dK), the
kernel of queries three (scores, dP, dQ). Backward is thus 3.5 times forward, where a kernel that
adds up dQ with atomics needs 2.5: that is the price of gradients that are the same in every run.

At best every tensor crosses the memory's edge once, because the cache holds what several programs
read. At worst no program finds anything in the cache: a kernel that owns tiles of queries reads
keys and values anew for each of them, and the other way round. What a device really reaches lies
between, and below both where it is bound by something else: this is a ceiling, not a forecast.
"""

import dataclasses
from typing import Literal

from paceline.accounting.attention.cost import visible_pairs

AttentionKernel = Literal["forward", "delta", "key_value_gradient", "query_gradient"]

_FLOAT32_BYTES = 4
# Its matmuls, and what crosses the memory's edge at best: tensors, and numbers per query.
_KERNELS: dict[AttentionKernel, tuple[int, int, int]] = {
    "forward": (2, 4, 1),
    "delta": (0, 2, 1),
    "key_value_gradient": (4, 6, 2),
    "query_gradient": (3, 5, 2),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelWork:
    """What one kernel computes and moves for one head."""

    flops: float
    best_bytes: float
    worst_bytes: float

    @property
    def best_intensity(self) -> float:
        """FLOPs per byte where every byte is moved once."""
        return self.flops / self.best_bytes

    @property
    def worst_intensity(self) -> float:
        """FLOPs per byte where nothing is found in the cache."""
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
    """Returns the work of one kernel over one head of as many queries as keys."""
    num_matmuls, num_tensors, num_numbers = _KERNELS[kernel]
    row = head_dim * element_bytes
    # Rows of the other side that all programs together read, tile by tile.
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
