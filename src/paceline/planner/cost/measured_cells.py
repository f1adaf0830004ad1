"""Correction factors from measured runs, by tokens per pass, model width and tensor ranks.

Libraries select kernels by matmul size, and hosts differ in launch speed. Both cause jumps that the
smooth formulas miss. Runs are grouped into cells that span half a doubling of tokens, half a
doubling of width and one power of two of tensor ranks. The mean log ratio of measured to predicted
seconds in a cell, shrunk towards zero if there are few runs, gives a factor on the time of a layer:

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
"""Number of cells along each axis: up to about 2^23 tokens, width 2^17 and 512 tensor ranks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredCells:
    """Log factors of all cells with measured runs."""

    entries: tuple[tuple[int, float], ...]
    """Pairs of a cell's index and its log factor."""

    @classmethod
    def of(cls, cells: npt.NDArray[np.int64], ratios: npt.NDArray[np.float64]) -> "MeasuredCells":
        """Returns the shrunk mean of the log ratios in every cell."""
        found = []
        for cell in np.unique(cells):
            inside = ratios[cells == cell]
            found.append((int(cell), round(float(inside.sum() / (len(inside) + _SHRINKAGE)), 5)))
        return cls(entries=tuple(found))

    def factor(self, tokens: Any, width: Any, tensor: Any) -> Any:
        """Returns the factors of layers with these tokens, widths and tensor ranks."""
        table = np.ones(_TOKENS * _WIDTHS * _RANKS)
        for cell, logarithm in self.entries:
            table[cell] = np.exp(logarithm)
        return table[cell_of(tokens, width, tensor)]


def cell_of(tokens: Any, width: Any, tensor: Any) -> npt.NDArray[np.int64]:
    """Returns the cell index of each layout."""

    def place(value: Any, size: int, steps: int) -> Any:
        index = np.rint(steps * np.log2(np.asarray(value, dtype=np.float64))).astype(np.int64)
        return np.clip(index, 0, size - 1)

    rows = place(tokens, _TOKENS, _STEPS_PER_DOUBLING)
    columns = place(width, _WIDTHS, _STEPS_PER_DOUBLING)
    return np.asarray((rows * _WIDTHS + columns) * _RANKS + place(tensor, _RANKS, 1))
