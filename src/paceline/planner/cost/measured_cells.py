"""What measured runs took beyond the formulas, by tokens in a pass, width and tensor ranks.

Libraries choose kernels by the sizes of a matmul, and hosts launch them more or less quickly; both
jump where a formula is smooth. Where several runs share a cell, half a doubling of tokens and of
width wide and of one number of tensor ranks, the mean logarithm of measured over predicted seconds,
drawn towards zero where there are few runs, becomes a factor on the time of a layer there:

    factor = exp(sum of logarithms / (runs + 2))

Cells without runs have the factor 1.
"""

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

_STEPS_PER_DOUBLING = 2
_SHRINKAGE = 2.0
_TOKENS, _WIDTHS, _RANKS = 48, 36, 10
"""Cells along each axis: up to 2^23 tokens, a width of 2^17 and 512 tensor ranks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredCells:
    """Logarithms of factors, with the cells that have any."""

    entries: tuple[tuple[int, float], ...]
    """Number of a cell, and its logarithm."""

    @classmethod
    def of(cls, cells: npt.NDArray[np.int64], ratios: npt.NDArray[np.float64]) -> "MeasuredCells":
        """Averages the logarithms of measured over predicted seconds in every cell."""
        found = []
        for cell in np.unique(cells):
            inside = ratios[cells == cell]
            found.append((int(cell), round(float(inside.sum() / (len(inside) + _SHRINKAGE)), 5)))
        return cls(entries=tuple(found))

    def factor(self, tokens: Any, width: Any, tensor: Any) -> Any:
        """Returns the factors of layers with so many tokens, columns and tensor ranks."""
        table = np.ones(_TOKENS * _WIDTHS * _RANKS)
        for cell, logarithm in self.entries:
            table[cell] = np.exp(logarithm)
        return table[cell_of(tokens, width, tensor)]


def cell_of(tokens: Any, width: Any, tensor: Any) -> npt.NDArray[np.int64]:
    """Returns the number of the cell of each layout."""

    def place(value: Any, size: int, steps: int) -> Any:
        index = np.rint(steps * np.log2(np.asarray(value, dtype=np.float64))).astype(np.int64)
        return np.clip(index, 0, size - 1)

    rows = place(tokens, _TOKENS, _STEPS_PER_DOUBLING)
    columns = place(width, _WIDTHS, _STEPS_PER_DOUBLING)
    return np.asarray((rows * _WIDTHS + columns) * _RANKS + place(tensor, _RANKS, 1))
