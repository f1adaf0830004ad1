"""What a multiprocessor offers a kernel, and how many of its blocks run there at once.

The figures are those of NVIDIA's CUDA C++ Programming Guide, table "Technical Specifications per
Compute Capability", and of AMD's CDNA3 Instruction Set Architecture reference guide. An
architecture that is not here is an error, never a guess.

Blocks run side by side until registers, shared memory or places for warps are used up. Registers
are given out to whole warps in portions, and NVIDIA's driver takes a little shared memory for
itself with every block.
"""

import dataclasses

from paceline.core.errors import HardwareError
from paceline.core.units import KIB


@dataclasses.dataclass(frozen=True, kw_only=True)
class Multiprocessor:
    """The resources of one multiprocessor (NVIDIA) or compute unit (AMD)."""

    device: str
    """A device of the hardware table that has it."""
    warp_size: int
    """Threads that run in step: a warp, or wavefront."""
    max_warps: int
    max_blocks: int
    registers: int
    """Of 32 bits, for all threads together."""
    registers_per_portion: int
    """Registers are given to a warp in multiples of this."""
    shared_bytes: int
    reserved_bytes_per_block: int
    shared_bytes_per_block: int
    """The most that one block may have."""


def _nvidia(
    device: str, *, max_warps: int, max_blocks: int, shared_kibibytes: int
) -> Multiprocessor:
    """Describes what all these generations have in common, and what tells them apart."""
    return Multiprocessor(
        device=device,
        warp_size=32,
        max_warps=max_warps,
        max_blocks=max_blocks,
        registers=65536,
        registers_per_portion=256,
        shared_bytes=shared_kibibytes * KIB,
        reserved_bytes_per_block=KIB,
        shared_bytes_per_block=(shared_kibibytes - 1) * KIB,
    )


_MULTIPROCESSORS: dict[str, Multiprocessor] = {
    "sm80": _nvidia("a100-sxm-80gb", max_warps=64, max_blocks=32, shared_kibibytes=164),
    "sm86": _nvidia("rtx-3090", max_warps=48, max_blocks=16, shared_kibibytes=100),
    "sm90": _nvidia("h100-sxm", max_warps=64, max_blocks=32, shared_kibibytes=228),
    "sm100": _nvidia("b200-sxm", max_warps=64, max_blocks=32, shared_kibibytes=228),
    # Four SIMD units, each with 512 registers for the 64 lanes of up to 8 wavefronts.
    "gfx942": Multiprocessor(
        device="mi300x",
        warp_size=64,
        max_warps=32,
        max_blocks=32,
        registers=4 * 512 * 64,
        registers_per_portion=8 * 64,
        shared_bytes=64 * KIB,
        reserved_bytes_per_block=0,
        shared_bytes_per_block=64 * KIB,
    ),
}


def known_architectures() -> tuple[str, ...]:
    """Returns the architectures whose limits are known."""
    return tuple(_MULTIPROCESSORS)


def find_multiprocessor(architecture: str) -> Multiprocessor:
    """Returns the limits of an architecture such as sm90."""
    if architecture not in _MULTIPROCESSORS:
        known = ", ".join(_MULTIPROCESSORS)
        raise HardwareError(f"unknown architecture {architecture!r}; known: {known}")
    return _MULTIPROCESSORS[architecture]


def blocks_at_once(
    multiprocessor: Multiprocessor, *, registers: int, shared_bytes: int, num_warps: int
) -> int:
    """Returns how many blocks of a kernel one multiprocessor runs side by side; 0: it cannot.

    Args:
        multiprocessor: Where the kernel runs.
        registers: Registers of one thread.
        shared_bytes: Shared memory of one block.
        num_warps: Warps of one block.
    """
    if shared_bytes > multiprocessor.shared_bytes_per_block:
        return 0
    portion = multiprocessor.registers_per_portion
    registers_per_warp = -(-registers * multiprocessor.warp_size // portion) * portion
    shared_per_block = shared_bytes + multiprocessor.reserved_bytes_per_block
    limits = [
        multiprocessor.max_blocks,
        multiprocessor.max_warps // num_warps,
        multiprocessor.registers // max(registers_per_warp, 1) // num_warps,
    ]
    if shared_per_block:
        limits.append(multiprocessor.shared_bytes // shared_per_block)
    return min(limits)


def occupancy(
    multiprocessor: Multiprocessor, *, registers: int, shared_bytes: int, num_warps: int
) -> float:
    """Returns the share of the places for warps that a kernel's blocks fill."""
    num_blocks = blocks_at_once(
        multiprocessor, registers=registers, shared_bytes=shared_bytes, num_warps=num_warps
    )
    return num_blocks * num_warps / multiprocessor.max_warps
