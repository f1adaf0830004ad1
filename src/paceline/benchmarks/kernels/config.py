"""Configuration of kernel compilation. Free of torch, because the command line imports it."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Literal, NamedTuple

from paceline.benchmarks.harness.config import PrecisionName
from paceline.core.errors import UsageError

Architecture = Literal["sm80", "sm86", "sm90", "sm100", "gfx942"]
Mask = Literal["causal", "full"]
Lengths = Literal["even", "ragged"]

_LARGEST_HEAD_DIM = 256


class KernelCase(NamedTuple):
    """One configuration, for which all attention kernels are compiled."""

    architecture: Architecture
    dtype: PrecisionName
    head_dim: int
    mask: Mask
    lengths: Lengths
    group: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelSweep:
    """Compile the attention kernels ahead of time, without a GPU, and show their resource use."""

    architecture: tuple[Architecture, ...] = ("sm80", "sm86", "sm90", "sm100", "gfx942")
    """GPUs to compile for: A100, RTX 3090, H100, B200, MI300X."""
    dtype: tuple[PrecisionName, ...] = ("bfloat16",)
    """dtypes of queries, keys and values."""
    head_dim: tuple[int, ...] = (64, 128)
    """Head dimensions."""
    mask: tuple[Mask, ...] = ("causal", "full")
    """Attention masks: causal, or full for no mask."""
    lengths: tuple[Lengths, ...] = ("even", "ragged")
    """Sequence lengths: even lengths are multiples of the tile and need no mask at the end."""
    group: tuple[int, ...] = (1, 4)
    """Query heads per key-value head; more than one compiles to a loop over them."""

    def __post_init__(self) -> None:
        if not all(1 <= head_dim <= _LARGEST_HEAD_DIM for head_dim in self.head_dim):
            raise UsageError(f"--head-dim must be from 1 to {_LARGEST_HEAD_DIM}")
        if min(self.group, default=1) < 1:
            raise UsageError("--group must be at least 1")

    def cases(self) -> Iterator[KernelCase]:
        """Yields every combination, architectures in the outer loop."""
        for values in itertools.product(
            self.architecture, self.dtype, self.head_dim, self.mask, self.lengths, self.group
        ):
            yield KernelCase(*values)
