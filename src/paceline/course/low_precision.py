"""What low precision does to sums, and what autocast computes in which dtype.

A sum has two errors: its terms may not be numbers of their dtype (0.01 is not one of float16),
and near the sum its own numbers may lie further apart than a term is large. Both are shown by
adding the same term many times.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class RepeatedSum:
    """One term added many times."""

    sum_dtype: str
    term_dtype: str
    num_terms: int
    result: float
    term: float
    """The term as its dtype represents it."""
    spacing: float
    """How far apart the numbers of the sum's dtype are at the result."""


def repeated_sum(
    *, sum_dtype: str, term_dtype: str, term: float = 0.01, num_terms: int = 1000
) -> RepeatedSum:
    """Adds a term again and again, rounding after every addition."""
    represented = np.dtype(term_dtype).type(term)
    total = np.dtype(sum_dtype).type(0)
    for _ in range(num_terms):
        total = np.dtype(sum_dtype).type(total + represented)
    return RepeatedSum(
        sum_dtype=sum_dtype,
        term_dtype=term_dtype,
        num_terms=num_terms,
        result=float(total),
        term=float(represented),
        spacing=float(np.spacing(total)),
    )


AUTOCAST_DTYPES: tuple[tuple[str, str, str], ...] = (
    ("parameters inside the autocast region", "float32", "float32"),
    ("output of the first linear layer", "bf16 or fp16", "bf16 or fp16"),
    ("output of the layer norm", "float32", "bf16 or fp16"),
    ("logits", "bf16 or fp16", "bf16 or fp16"),
    ("loss (cross-entropy)", "float32", "float32"),
    ("gradients of the parameters", "float32", "float32"),
)
"""Of a linear layer, a layer norm and a linear layer under autocast: on CUDA, and on a CPU."""
