import pytest

from paceline.accounting.attention import (
    MULTIPROCESSORS,
    blocks_at_once,
    find_multiprocessor,
    occupancy,
)
from paceline.core.errors import HardwareError
from paceline.core.hardware import find_device

H100 = find_multiprocessor("sm90")


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "num_warps", "blocks"),
    [
        # 65,536 registers: 255 round up to 256 per thread, so one block of 256 threads uses all.
        (255, 0, 8, 1),
        (128, 0, 8, 2),
        (129, 0, 8, 1),
        (32, 0, 8, 8),
        # 228 KiB of shared memory, of which the driver takes 1 KiB per block.
        (32, 75 * 1024, 4, 3),
        (32, 76 * 1024, 4, 2),
        (32, 227 * 1024, 4, 1),
        (32, 227 * 1024 + 1, 4, 0),
        # At most 64 warps and 32 blocks.
        (16, 0, 1, 32),
        (16, 0, 16, 4),
    ],
)
def test_what_is_used_up_first_decides(
    registers: int, shared_bytes: int, num_warps: int, blocks: int
) -> None:
    used = {"registers": registers, "shared_bytes": shared_bytes, "num_warps": num_warps}
    assert blocks_at_once(H100, **used) == blocks
    assert occupancy(H100, **used) == blocks * num_warps / 64


def test_amd_counts_wavefronts_of_64() -> None:
    unit = find_multiprocessor("gfx942")
    # 512 registers per lane in each of four units: 256 allow two wavefronts per unit.
    assert blocks_at_once(unit, registers=256, shared_bytes=0, num_warps=4) == 2
    assert blocks_at_once(unit, registers=257, shared_bytes=0, num_warps=4) == 1
    assert blocks_at_once(unit, registers=64, shared_bytes=32 * 1024, num_warps=4) == 2


def test_every_architecture_names_a_device_of_the_table() -> None:
    for multiprocessor in MULTIPROCESSORS.values():
        find_device(multiprocessor.device)


def test_an_unknown_architecture_is_an_error() -> None:
    with pytest.raises(HardwareError, match="unknown architecture 'sm70'; known: sm80"):
        find_multiprocessor("sm70")
