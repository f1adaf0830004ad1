"""Efficiency loss of small matmuls, for arrays of layouts.

A matmul of M tokens with a matrix of K rows and N columns has 2 M N K FLOPs, at the rate R of large
matmuls. Small matmuls do not reach R: the tile pipeline must fill and drain along every dimension,
and operands are read and results written. With a characteristic length for each dimension,

    seconds = 2 M N K / R · (1 + m / M + w / N + w / K) · (1 + u, where N or K is misaligned)

m is `Cluster.matmul_tokens`, w `Cluster.matmul_width`, and u `Cluster.misaligned`: tensor cores
need widths that are multiples of the 128-element tile. Tensor parallelism divides N of the first
matrices of a branch (queries, keys, values; up) and K of the last one. Backward is two such
matmuls, and full recomputation one more. m, w and u are 0 unless a calibration sets them.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from paceline.planner.cost.cluster import Cluster
from paceline.planner.cost.layouts import Layouts, Workload

_TILE = 128


class Matrix(NamedTuple):
    """Columns and rows of a matrix on one tensor rank, and the number of them per block."""

    columns: Any
    rows: Any
    number: float = 1.0


def block_matrices(layouts: Layouts, workload: Workload) -> Iterator[Matrix]:
    """Yields the matrices of one block on one tensor rank."""
    shape, ranks = workload.shape, layouts.tensor
    width = shape.d_model
    if shape.has_attention:
        projected = shape.attention_width + 2 * shape.key_value_width
        yield Matrix(projected / ranks, width)
        yield Matrix(width, shape.attention_width / ranks)
    opening = 2 if shape.feed_forward == "swiglu" else 1
    yield Matrix(shape.d_ff / ranks, width, opening)
    yield Matrix(width, shape.d_ff / ranks)


def small_matmul_flops(layouts: Layouts, workload: Workload, cluster: Cluster) -> Any:
    """Returns the time lost to small matmuls per layer and pass, in FLOPs at the full rate."""
    if not (cluster.matmul_tokens or cluster.matmul_width or cluster.misaligned):
        return 0.0
    tokens = workload.tokens / layouts.context
    lost: Any = 0.0
    for matrix in block_matrices(layouts, workload):
        lost = lost + matrix.number * _lost_flops(tokens, matrix, cluster)
    return lost * (2 + workload.forwards(layouts))


def small_head_flops(layouts: Layouts, workload: Workload, cluster: Cluster) -> Any:
    """Returns the equivalent of `small_matmul_flops` for the output layer per pass.

    The output layer is never recomputed.
    """
    matrix = Matrix(workload.shape.vocab_size / layouts.tensor, workload.shape.d_model)
    return 3 * _lost_flops(workload.tokens / layouts.context, matrix, cluster)


def _lost_flops(tokens: Any, matrix: Matrix, cluster: Cluster) -> Any:
    columns, rows = matrix.columns, matrix.rows
    area = np.multiply(columns, rows)
    edges = cluster.matmul_tokens * area + cluster.matmul_width * tokens * np.add(columns, rows)
    if not cluster.misaligned:
        return 2 * edges
    is_misaligned = (np.mod(columns, _TILE) != 0) | (np.mod(rows, _TILE) != 0)
    longer = np.where(is_misaligned, cluster.misaligned, 0.0)
    return 2 * (edges + longer * (tokens * area + edges))
