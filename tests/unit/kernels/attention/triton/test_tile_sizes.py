import pytest

from paceline.core.errors import HardwareError
from paceline.core.specs import DType
from paceline.kernels.attention.triton.tile_sizes import choose_tilings


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("architecture", ["sm80", "sm86", "sm90", "sm100", "gfx942"])
def test_tilings_are_powers_of_two(architecture: str, dtype: DType) -> None:
    for head_dim in (1, 16, 20, 64, 100, 128, 192, 256):
        for tiling in choose_tilings(architecture, dtype, head_dim):
            for block in (tiling.block_queries, tiling.block_keys):
                assert block >= 16
                assert block.bit_count() == 1


def test_architectures_that_are_not_in_the_table() -> None:
    for architecture in ("sm89", "sm120"):
        assert choose_tilings(architecture, "bfloat16", 128) == choose_tilings(
            "sm86", "bfloat16", 128
        )
    assert choose_tilings("gfx90a", "float32", 64) == choose_tilings("gfx942", "float32", 64)
    with pytest.raises(HardwareError, match="sm75"):
        choose_tilings("sm75", "float16", 64)
