"""What a packed row says of its numbers, and what it leaves out."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.parallel.compression.codec import BLOCK, Codec, CodeName, compiled_kernels

_NAMES: tuple[CodeName, ...] = ("int8", "int4")
_WAYS = [
    pytest.param(Codec(name, uses_compiled=compiled), id=f"{name}-{way}")
    for name in _NAMES
    for compiled, way in ((True, "compiled"), (False, "operators"))
]
_SMALLEST = torch.finfo(torch.float32).smallest_normal


def _numbers(seed: int, count: int, spread: float) -> Tensor:
    """Returns numbers whose magnitudes differ by up to a power of ten per block."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randn(count, generator=generator) * spread
    return torch.randn(count, generator=generator) * 10**exponents


def _packed(codec: Codec, values: Tensor, residual: Tensor, blocks: int) -> Tensor:
    row = torch.full((codec.row_bytes(blocks),), 0x5A, dtype=torch.uint8)
    codec.pack(values, residual, row)
    return row


def _unpacked(codec: Codec, row: Tensor, count: int) -> Tensor:
    target = torch.full((count,), 7.0)
    codec.unpack(row, target, adds=False)
    return target


@pytest.mark.parametrize("codec", _WAYS)
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31), count=st.integers(0, 3 * BLOCK), spread=st.sampled_from([0, 1, 5])
)
def test_numbers_are_the_row_and_what_it_leaves_out(
    codec: Codec, seed: int, count: int, spread: float
) -> None:
    values, before = _numbers(seed, count, spread), _numbers(seed + 1, count, spread) / 16
    residual = before.clone()
    found = _unpacked(codec, _packed(codec, values, residual, 3), count)
    given = values + before
    assert torch.equal(found.double() + residual.double(), given.double())  # To the last bit.
    for block in range(0, count, BLOCK):
        part = slice(block, block + BLOCK)
        # The scale is at most one step of bf16 above the exact one, and a code half a scale off.
        largest = float(given[part].abs().max())
        assert float(residual[part].abs().max()) <= largest / codec.largest * (0.5 + 2**-7)


@pytest.mark.skipif(compiled_kernels() is None, reason="numba is not installed")
@pytest.mark.parametrize("name", _NAMES)
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    count=st.integers(1, 3 * BLOCK),
    spread=st.sampled_from([0, 1, 20]),
    special=st.sampled_from([0.0, -0.0, 1e-42, 3.4e38, math.inf, math.nan]),
)
def test_compiled_kernels_and_operators_give_the_same_bits(
    name: CodeName, seed: int, count: int, spread: float, special: float
) -> None:
    values = _numbers(seed, count, spread).clamp(-3e38, 3e38)
    values[seed % count] = special
    rows, residuals, sums = [], [], []
    for compiled in (True, False):
        codec = Codec(name, uses_compiled=compiled)
        residual = _numbers(seed + 1, count, 0)
        rows.append(_packed(codec, values, residual, 3))
        total = _numbers(seed + 2, count, 0)
        codec.unpack(rows[0], total, adds=True)
        residuals.append(residual)
        sums.append(total)
    assert torch.equal(*rows)
    for one, other in (residuals, sums):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32)) or torch.equal(
            one.nan_to_num(), other.nan_to_num()
        )


@pytest.mark.parametrize("codec", _WAYS)
@pytest.mark.parametrize("problem", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_noticed_and_leaves_no_trace(
    codec: Codec, problem: float
) -> None:
    values = _numbers(0, 3 * BLOCK, 0)
    values[BLOCK + 5] = problem
    before = _numbers(1, 3 * BLOCK, 0) / 100
    residual = before.clone()
    found = _unpacked(codec, _packed(codec, values, residual, 3), 3 * BLOCK)
    inside = slice(BLOCK, 2 * BLOCK)
    assert found[inside].isnan().all()
    assert torch.equal(residual[inside], before[inside])
    assert found[:BLOCK].isfinite().all()
    assert found[2 * BLOCK :].isfinite().all()


@pytest.mark.parametrize("codec", _WAYS)
def test_numbers_too_small_for_a_scale_wait_in_what_is_left(codec: Codec) -> None:
    values = torch.full((BLOCK,), _SMALLEST)
    residual = torch.zeros(BLOCK)
    found = _unpacked(codec, _packed(codec, values, residual, 1), BLOCK)
    assert torch.equal(found, torch.zeros(BLOCK))
    assert torch.equal(residual, values)


@pytest.mark.parametrize("codec", _WAYS)
def test_what_is_left_out_is_sent_later(codec: Codec) -> None:
    """A number that is always rounded away alone still arrives, in the mean over steps."""
    values = torch.full((BLOCK,), 0.01)
    values[0] = 1.0
    residual, total = torch.zeros(BLOCK), torch.zeros(BLOCK)
    num_steps = 400
    for _ in range(num_steps):
        codec.unpack(_packed(codec, values, residual, 1), total, adds=True)
    assert torch.allclose(total / num_steps, values, atol=1 / codec.largest / num_steps)


@pytest.mark.parametrize("codec", _WAYS)
def test_a_row_may_have_more_space_than_numbers(codec: Codec) -> None:
    values = torch.full((3,), float(codec.largest))  # The scale is 1.
    row = _packed(codec, values, torch.zeros(3), 2)
    assert torch.equal(_unpacked(codec, row, 2 * BLOCK)[3:], torch.zeros(2 * BLOCK - 3))
    assert torch.equal(_unpacked(codec, row, 2), values[:2])


def test_rows_have_two_bytes_per_block_beside_their_codes() -> None:
    assert Codec("int8").row_bytes(3) == 3 * (256 + 2)
    assert Codec("int4").row_bytes(3) == 3 * (128 + 2)
    assert (Codec("int8").largest, Codec("int4").largest) == (127, 7)
