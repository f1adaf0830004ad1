"""Tile sizes of the Triton kernels, by architecture, dtype and head size.

The table is static: there is no search at run time, so that two runs of a program launch the same
kernels and return bitwise identical results.
"""

import dataclasses
import os
from typing import NamedTuple

from paceline.core.errors import HardwareError
from paceline.core.specs import DType, bytes_per_element

LARGEST_HEAD_DIM = 256
SMALLEST_BLOCK = 16  # smallest side of a matmul on tensor cores


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The division of one kernel's work."""

    block_queries: int
    """Queries in a tile; a power of two, at least 16."""
    block_keys: int
    """Keys in a tile; a power of two, at least 16."""
    num_warps: int
    """Warps that compute a tile together."""
    num_stages: int
    """Tiles in flight: those after the current one are loaded while it is computed."""


class Tilings(NamedTuple):
    """The tilings of all attention kernels."""

    forward: Tiling
    key_value_gradient: Tiling
    """Tiling of the kernel that computes the gradients of keys and values."""
    query_gradient: Tiling
    """Tiling of the kernel that computes the gradient of queries."""


def padded_size(size: int) -> int:
    """Returns the next power of two that tensor cores can multiply."""
    return max(SMALLEST_BLOCK, 1 << (size - 1).bit_length())


def searches_tilings() -> bool:
    """Returns whether PACELINE_AUTOTUNE=1 replaces this table by a search."""
    return os.environ.get("PACELINE_AUTOTUNE") == "1"


def choose_tilings(architecture: str, dtype: DType, head_dim: int) -> Tilings:
    """Returns the tilings for an architecture such as sm90 or gfx942.

    NVIDIA architectures from sm80 on that are not in the table get the tilings of sm86: none has
    less shared memory, so they fit everywhere. AMD architectures get those of gfx942, for the same
    reason. Architectures before sm80 raise an error: they have no bf16 matmuls.
    """
    rows = _TABLE[_family(architecture), bytes_per_element(dtype)]
    width = padded_size(head_dim)
    return next(rows[limit] for limit in sorted(rows) if width <= limit)


def _family(architecture: str) -> str:
    if architecture in _ARCHITECTURES:
        return architecture
    if architecture.startswith("gfx"):
        return "gfx942"
    if architecture.startswith("sm") and int(architecture.removeprefix("sm")) >= 80:
        return "sm86"
    raise HardwareError(
        f"the Triton attention does not run on {architecture}: it needs sm80 or newer, or an AMD "
        'GPU; use backend="sdpa"'
    )


# By architecture and bytes per element: tilings by the largest padded head size they apply to. Each
# is queries, keys, warps, stages; forward, then gradients of keys and values, then of queries.
_TABLE: dict[tuple[str, int], dict[int, Tilings]] = {
    ("sm80", 2): {
        64: Tilings(Tiling(128, 64, 4, 3), Tiling(64, 64, 4, 2), Tiling(64, 64, 4, 2)),
        128: Tilings(Tiling(128, 64, 8, 2), Tiling(64, 64, 8, 2), Tiling(64, 64, 8, 2)),
        256: Tilings(Tiling(64, 32, 8, 2), Tiling(32, 32, 8, 2), Tiling(32, 32, 8, 2)),
    },
    ("sm80", 4): {
        64: Tilings(Tiling(64, 32, 8, 2), Tiling(32, 32, 8, 2), Tiling(32, 32, 8, 2)),
        128: Tilings(Tiling(64, 32, 8, 2), Tiling(32, 32, 8, 2), Tiling(32, 32, 8, 2)),
        256: Tilings(Tiling(32, 16, 8, 2), Tiling(16, 16, 8, 1), Tiling(16, 16, 8, 1)),
    },
    ("sm86", 2): {
        64: Tilings(Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 2), Tiling(64, 64, 4, 2)),
        128: Tilings(Tiling(64, 64, 4, 2), Tiling(32, 64, 8, 2), Tiling(64, 32, 8, 2)),
        256: Tilings(Tiling(64, 32, 8, 2), Tiling(32, 32, 8, 1), Tiling(32, 32, 8, 1)),
    },
    ("sm86", 4): {
        64: Tilings(Tiling(64, 32, 8, 2), Tiling(32, 32, 8, 2), Tiling(32, 32, 8, 2)),
        128: Tilings(Tiling(32, 32, 8, 2), Tiling(32, 32, 8, 1), Tiling(32, 32, 8, 1)),
        256: Tilings(Tiling(32, 16, 8, 1), Tiling(16, 16, 8, 1), Tiling(16, 16, 8, 1)),
    },
    ("sm90", 2): {
        64: Tilings(Tiling(128, 128, 8, 3), Tiling(64, 128, 8, 3), Tiling(128, 64, 8, 3)),
        128: Tilings(Tiling(128, 64, 8, 3), Tiling(32, 128, 8, 3), Tiling(128, 64, 8, 2)),
        256: Tilings(Tiling(64, 64, 8, 2), Tiling(32, 32, 8, 2), Tiling(64, 32, 8, 2)),
    },
    ("sm90", 4): {
        64: Tilings(Tiling(64, 32, 8, 2), Tiling(32, 32, 8, 2), Tiling(64, 32, 8, 2)),
        128: Tilings(Tiling(64, 16, 8, 2), Tiling(32, 32, 8, 1), Tiling(32, 32, 8, 2)),
        256: Tilings(Tiling(32, 32, 8, 2), Tiling(16, 16, 8, 2), Tiling(16, 16, 8, 2)),
    },
    ("sm100", 2): {
        64: Tilings(Tiling(128, 128, 8, 3), Tiling(64, 128, 8, 3), Tiling(128, 64, 8, 3)),
        128: Tilings(Tiling(128, 64, 8, 3), Tiling(64, 128, 8, 2), Tiling(128, 64, 8, 2)),
        256: Tilings(Tiling(64, 64, 8, 2), Tiling(32, 32, 8, 2), Tiling(64, 32, 8, 2)),
    },
    ("gfx942", 2): {
        64: Tilings(Tiling(128, 64, 4, 2), Tiling(64, 64, 4, 1), Tiling(64, 64, 4, 1)),
        128: Tilings(Tiling(128, 64, 4, 1), Tiling(32, 64, 4, 1), Tiling(64, 32, 4, 1)),
        256: Tilings(Tiling(64, 32, 4, 1), Tiling(32, 32, 4, 1), Tiling(32, 32, 4, 1)),
    },
    ("gfx942", 4): {
        64: Tilings(Tiling(64, 32, 4, 1), Tiling(32, 32, 4, 1), Tiling(32, 32, 4, 1)),
        128: Tilings(Tiling(32, 32, 4, 1), Tiling(16, 32, 4, 1), Tiling(32, 16, 4, 1)),
        256: Tilings(Tiling(32, 16, 4, 1), Tiling(16, 16, 4, 1), Tiling(16, 16, 4, 1)),
    },
}
_TABLE["sm100", 4] = _TABLE["sm90", 4]
_ARCHITECTURES = {architecture for architecture, _ in _TABLE}
