"""Multiprocessor resources, and the number of a kernel's blocks that run on one at a time.

The figures come from NVIDIA's CUDA C++ Programming Guide, table "Technical Specifications per
Compute Capability", and from AMD's CDNA3 Instruction Set Architecture reference guide. An unknown
architecture is an error, never a guess.

Blocks run concurrently until registers, shared memory or warp slots are used up. Registers are
allocated to whole warps in fixed portions. NVIDIA's driver reserves some shared memory for every
block.
"""

import dataclasses

from paceline.core.errors import HardwareError
from paceline.core.units import KIB


@dataclasses.dataclass(frozen=True, kw_only=True)
class Multiprocessor:
    """The resources of one multiprocessor (NVIDIA) or compute unit (AMD)."""

    device: str
    """A device in the hardware table that has this multiprocessor."""
    max_warps: int
    max_blocks: int
    shared_bytes: int
    # The defaults are common to all NVIDIA generations.
    warp_size: int = 32
    """Threads that run in lockstep: a warp (NVIDIA) or wavefront (AMD)."""
    registers: int = 65536
    """Number of 32-bit registers, shared by all threads."""
    registers_per_portion: int = 256
    """Registers are allocated to a warp in multiples of this."""
    reserved_bytes_per_block: int = KIB


MULTIPROCESSORS: dict[str, Multiprocessor] = {
    "sm80": Multiprocessor(
        device="a100-sxm-80gb", max_warps=64, max_blocks=32, shared_bytes=164 * KIB
    ),
    "sm86": Multiprocessor(device="rtx-3090", max_warps=48, max_blocks=16, shared_bytes=100 * KIB),
    "sm90": Multiprocessor(device="h100-sxm", max_warps=64, max_blocks=32, shared_bytes=228 * KIB),
    "sm100": Multiprocessor(device="b200-sxm", max_warps=64, max_blocks=32, shared_bytes=228 * KIB),
    # Four SIMD units, each with 512 registers for the 64 lanes of up to 8 wavefronts.
    "gfx942": Multiprocessor(
        device="mi300x",
        max_warps=32,
        max_blocks=32,
        shared_bytes=64 * KIB,
        warp_size=64,
        registers=4 * 512 * 64,
        registers_per_portion=8 * 64,
        reserved_bytes_per_block=0,
    ),
}


def find_multiprocessor(architecture: str) -> Multiprocessor:
    """Returns the limits of an architecture such as sm90."""
    if architecture not in MULTIPROCESSORS:
        known = ", ".join(MULTIPROCESSORS)
        raise HardwareError(f"unknown architecture {architecture!r}; known: {known}")
    return MULTIPROCESSORS[architecture]


def blocks_at_once(
    multiprocessor: Multiprocessor, *, registers: int, shared_bytes: int, num_warps: int
) -> int:
    """Returns how many blocks of a kernel one multiprocessor runs at a time; 0 if none fit.

    Each thread takes `registers`; each block takes `shared_bytes` and `num_warps`.
    """
    portion = multiprocessor.registers_per_portion
    registers_per_warp = -(-registers * multiprocessor.warp_size // portion) * portion
    shared_per_block = shared_bytes + multiprocessor.reserved_bytes_per_block
    return min(
        multiprocessor.max_blocks,
        multiprocessor.max_warps // num_warps,
        multiprocessor.registers // max(registers_per_warp, 1) // num_warps,
        multiprocessor.shared_bytes // max(shared_per_block, 1),
    )


def occupancy(
    multiprocessor: Multiprocessor, *, registers: int, shared_bytes: int, num_warps: int
) -> float:
    """Returns the fraction of warp slots that a kernel's blocks fill."""
    num_blocks = blocks_at_once(
        multiprocessor, registers=registers, shared_bytes=shared_bytes, num_warps=num_warps
    )
    return num_blocks * num_warps / multiprocessor.max_warps
