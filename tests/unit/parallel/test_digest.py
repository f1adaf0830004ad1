"""Tests that every bit of a tensor affects its hash, at any position in memory."""

import pytest
import torch

from paceline.parallel.digest import combined, digest, digests

CPU = torch.device("cpu")


def flip(tensor: torch.Tensor, byte: int, bit: int) -> None:
    tensor.view(-1).view(torch.uint8)[byte] ^= 1 << bit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
@pytest.mark.parametrize(("start", "length"), [(0, 64), (1, 63), (1, 6), (3, 5), (0, 1), (1, 1)])
def test_every_bit_counts(dtype: torch.dtype, start: int, length: int) -> None:
    buffer = torch.arange(70).to(dtype)
    part = buffer[start : start + length]
    before = int(digest(part))
    assert int(digest(part)) == before
    for byte in range(part.nbytes):
        for bit in range(8):
            flip(part, byte, bit)
            assert int(digest(part)) != before
            flip(part, byte, bit)
    assert int(digest(part)) == before


@pytest.mark.parametrize(("start", "length"), [(8, 8), (4, 12), (0, 24), (7, 17)])
def test_flips_in_one_word_never_cancel(start: int, length: int) -> None:
    """One byte gains three, the next loses one: as bytes of their own, those would cancel."""
    buffer = torch.zeros(24, dtype=torch.uint8)
    part = buffer[start : start + length]  # Has the word at 8, whatever is around it.
    buffer[9] = 1
    before = int(digest(part))
    buffer[8:10] = torch.tensor([3, 0])
    assert int(digest(part)) != before


def test_rows_and_places_count() -> None:
    many = torch.randn(3 * 4096 * 2 + 5)
    before = int(digest(many))
    for byte in (0, 4096 * 8, 4096 * 16 + 1, many.nbytes - 1):
        flip(many, byte, 7)
        assert int(digest(many)) != before
        flip(many, byte, 7)
    swapped = torch.cat([many[8192:16384], many[:8192], many[16384:]])
    assert int(digest(swapped)) != before


def test_a_view_that_is_not_contiguous_has_the_hash_of_its_elements() -> None:
    matrix = torch.randn(6, 4)
    assert int(digest(matrix.T)) == int(digest(matrix.T.contiguous()))


def test_several_tensors_have_one_hash_in_which_their_order_counts() -> None:
    first, second = torch.randn(3), torch.randn(5)
    hashes = digests([first, second], CPU)
    assert hashes.tolist() == [int(digest(first)), int(digest(second))]
    assert int(combined(hashes)) != int(combined(hashes.flip(0)))
    assert digests([], CPU).shape == (0,)
    assert int(combined(digests([], CPU))) == 0
