"""Tests that the repaired interpreter handles bf16 as GPUs do."""

# The interpreter must be enabled before a kernel is defined.
from tests.unit.kernels.attention.triton.interpreter import DEVICE, tl, triton

# isort: split

import torch


@triton.jit
def _round_and_multiply(numbers, rounded, products, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tile = tl.load(numbers + places).to(tl.bfloat16)
    tl.store(rounded + places, tile)
    tl.store(products + places, tl.dot(tile, tile))


def test_bfloat16_is_rounded_to_the_nearest_even_and_multiplied_as_a_number() -> None:
    numbers = torch.randn(16, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    # Halfway between two neighbours: the even one lies above the first, below the second.
    numbers[0, :2] = torch.tensor([1 + 3 * 2**-8, 1 + 2**-8])
    rounded, products = torch.empty_like(numbers, dtype=torch.bfloat16), torch.empty_like(numbers)
    _round_and_multiply[(1,)](numbers, rounded, products, 16)
    expected = numbers.to(torch.bfloat16)
    assert torch.equal(rounded, expected)
    torch.testing.assert_close(products, expected.float() @ expected.float())
