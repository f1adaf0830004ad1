"""Cost formulas of collectives, in the conventions of nccl-tests.

p ranks exchange S bytes over links that carry W bytes per second in each direction, with a
latency alpha per hop. S is counted as in nccl-tests: the whole result of an all-gather, the
whole input of a reduce-scatter, one rank's buffer otherwise. All functions accept arrays.

    ring all-reduce                 2(p-1) alpha + 2(p-1)/p S/W
    ring all-gather, reduce-scatter  (p-1) alpha +  (p-1)/p S/W
    pairwise all-to-all              (p-1) alpha +  (p-1)/p S/W
    reduce_to_owners, gather_from_owners: as reduce-scatter and all-gather
    pipelined broadcast, reduce      (p-1) alpha +          S/W
    double tree all-reduce    2 ceil(log2 p) alpha +       2 S/W

The algorithm bandwidth is S/t. The bus bandwidth multiplies it by the share of S that each link
must carry, so that a perfect collective reaches W for every p.
"""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.core.collectives import Operation

Numbers: TypeAlias = "npt.NDArray[np.float64] | npt.NDArray[np.int64] | float | int"


def bus_factor(operation: Operation, world_size: Numbers) -> Any:
    """Returns the ratio of bus bandwidth to algorithm bandwidth."""
    ranks = np.asarray(world_size, dtype=np.float64)
    if operation == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if operation not in ("broadcast", "reduce"):
        return (ranks - 1) / ranks
    return np.where(ranks > 1, 1.0, 0.0)


def ring_time_s(
    operation: Operation,
    size_bytes: Numbers,
    world_size: Numbers,
    *,
    latency_s: Numbers,
    bytes_per_s: Numbers,
) -> Any:
    """Returns the seconds of a collective on a ring (pipelined, for broadcast and reduce)."""
    ranks = np.asarray(world_size, dtype=np.float64)
    hops = (ranks - 1) * (2 if operation == "all_reduce" else 1)
    return hops * latency_s + bus_factor(operation, ranks) * np.asarray(size_bytes) / bytes_per_s


def tree_all_reduce_time_s(
    size_bytes: Numbers, world_size: Numbers, *, latency_s: Numbers, bytes_per_s: Numbers
) -> Any:
    """Returns the seconds of an all-reduce over two complementary trees."""
    ranks = np.asarray(world_size, dtype=np.float64)
    transfer = np.where(ranks > 1, 2 * np.asarray(size_bytes) / bytes_per_s, 0.0)
    return 2 * np.ceil(np.log2(ranks)) * latency_s + transfer
