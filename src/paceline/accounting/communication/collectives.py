"""What collectives cost: formulas, the conventions of nccl-tests, and a fit to measurements.

p ranks exchange S bytes over links that carry W bytes per second in each direction, with a
latency alpha per hop. S is counted as nccl-tests does: the whole result of an all-gather, the
whole input of a reduce-scatter, one rank's buffer otherwise. All cost functions take arrays.

    ring all-reduce                 2(p-1) alpha + 2(p-1)/p S/W
    ring all-gather, reduce-scatter  (p-1) alpha +  (p-1)/p S/W
    pairwise all-to-all              (p-1) alpha +  (p-1)/p S/W
    reduce to owners, gather from owners: as reduce-scatter and all-gather
    pipelined broadcast, reduce      (p-1) alpha +          S/W
    double tree all-reduce    2 ceil(log2 p) alpha +       2 S/W
    hierarchical all-reduce   reduce-scatter inside hosts, all-reduce of S/m across, all-gather

The algorithm bandwidth is S/t. The bus bandwidth multiplies it by the share of S that each link
must carry, so that a perfect collective shows W whatever p is.
"""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.core.collectives import Operation

Numbers: TypeAlias = "npt.NDArray[np.float64] | npt.NDArray[np.int64] | float | int"


def bus_factor(operation: Operation, world_size: Numbers) -> Any:
    """Returns bus bandwidth over algorithm bandwidth."""
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


def hierarchical_all_reduce_time_s(
    size_bytes: Numbers,
    *,
    num_hosts: Numbers,
    ranks_per_host: Numbers,
    inside_latency_s: Numbers,
    inside_bytes_per_s: Numbers,
    across_latency_s: Numbers,
    across_bytes_per_s: Numbers,
) -> Any:
    """Returns the seconds of a two-level all-reduce.

    `across_bytes_per_s` is what one rank has to other hosts while all ranks of its host use
    theirs.
    """
    size = np.asarray(size_bytes, dtype=np.float64)
    inside = 2 * ring_time_s(
        "reduce_scatter",
        size,
        ranks_per_host,
        latency_s=inside_latency_s,
        bytes_per_s=inside_bytes_per_s,
    )
    across = ring_time_s(
        "all_reduce",
        size / np.asarray(ranks_per_host),
        num_hosts,
        latency_s=across_latency_s,
        bytes_per_s=across_bytes_per_s,
    )
    return inside + across
