"""Packing and unpacking in one pass over memory, compiled by numba for the CPU at hand.

The arithmetic is that of `Codec`'s operators, to the bit: no fast-math, no fused multiply-add that
would round otherwise. A block's numbers are kept in 1 KiB beside the loop, so its second and third
pass stay in the first cache.

Adding and subtracting 1.5 * 2^23 rounds a float32 below 2^22 to the nearest integer, ties to even,
in two instructions that vectorise.
"""

import numba
import numpy as np
from numpy.typing import NDArray

_BLOCK = 256
_HALF = 128
_ROUNDS = np.float32(12582912.0)
_SMALLEST = np.float32(np.finfo(np.float32).smallest_normal)
_NAN = np.int16(0x7FC0)
_ABSOLUTE = np.int32(0x7FFFFFFF)
_INFINITE = np.int32(0x7F800000)

Floats = NDArray[np.float32]


@numba.njit(inline="always")
def _scale_of(
    values: Floats,
    residual: Floats,
    begin: int,
    block: Floats,
    bits: NDArray[np.int32],
    work: Floats,
    work_bits: NDArray[np.int32],
    largest: np.float32,
) -> None:
    """Writes a block's numbers to `block`, and its scale, or inf, to the first of `work`."""
    count = min(_BLOCK, max(0, values.size - begin))
    for index in range(count):
        block[index] = values[begin + index] + residual[begin + index]
    for index in range(count, _BLOCK):
        block[index] = 0
    most = np.int32(0)
    for index in range(_BLOCK):  # As integers, NaN is larger than infinity, and all else below.
        most = max(most, bits[index] & _ABSOLUTE)
    work_bits[0] = most
    if most >= _INFINITE:
        work[0] = np.inf
        return
    work[0] = work[0] / largest
    work_bits[0] = (work_bits[0] + np.int32(0xFFFF)) & ~np.int32(0xFFFF)


@numba.njit(nogil=True, error_model="numpy")
def _pack(
    values: Floats,
    residual: Floats,
    scales: NDArray[np.int16],
    codes: NDArray[np.uint8],
    largest: np.float32,
    has_4_bits: bool,
) -> None:
    block = np.empty(_BLOCK, np.float32)
    bits = block.view(np.int32)
    work = np.empty(1, np.float32)
    work_bits = work.view(np.int32)
    for number in range(scales.size):
        begin = number * _BLOCK
        _scale_of(values, residual, begin, block, bits, work, work_bits, largest)
        scale = work[0]
        count = min(_BLOCK, max(0, values.size - begin))
        if scale < _SMALLEST or not np.isfinite(scale):
            codes[number, :] = 0x88 if has_4_bits else 0
            scales[number] = 0 if scale < _SMALLEST else _NAN
            if scale < _SMALLEST:
                for index in range(count):
                    residual[begin + index] = block[index]
            continue
        scales[number] = work_bits[0] >> 16
        inverse = np.float32(1) / scale
        for index in range(count):
            value = block[index]
            rounded = (value * inverse + _ROUNDS) - _ROUNDS
            block[index] = rounded
            residual[begin + index] = value - rounded * scale
        if has_4_bits:
            for index in range(_HALF):
                low, high = np.int32(block[index]) + 8, np.int32(block[index + _HALF]) + 8
                codes[number, index] = np.uint8(low | (high << 4))
        else:
            for index in range(_BLOCK):
                codes[number, index] = np.uint8(np.int32(block[index]) & 0xFF)


@numba.njit(nogil=True, error_model="numpy")
def _unpack(
    scales: NDArray[np.int16],
    codes: NDArray[np.uint8],
    target: Floats,
    adds: bool,
    has_4_bits: bool,
) -> None:
    block = np.empty(_BLOCK, np.float32)
    work = np.empty(1, np.float32)
    work_bits = work.view(np.int32)
    for number in range(scales.size):
        begin = number * _BLOCK
        count = min(_BLOCK, target.size - begin)
        if count <= 0:
            return
        work_bits[0] = np.int32(scales[number]) << 16
        scale = work[0]
        if has_4_bits:
            for index in range(_HALF):
                code = np.int32(codes[number, index])
                block[index] = np.float32((code & 15) - 8) * scale
                block[index + _HALF] = np.float32((code >> 4) - 8) * scale
        else:
            for index in range(_BLOCK):
                block[index] = np.float32(np.int8(codes[number, index])) * scale
        if adds:
            for index in range(count):
                target[begin + index] += block[index]
        else:
            for index in range(count):
                target[begin + index] = block[index]


def pack_8_bits(
    values: Floats, residual: Floats, scales: NDArray[np.int16], codes: NDArray[np.uint8]
) -> None:
    """Packs as `Codec.pack` does, with 8 bits."""
    _pack(values, residual, scales, codes, np.float32(127), False)


def pack_4_bits(
    values: Floats, residual: Floats, scales: NDArray[np.int16], codes: NDArray[np.uint8]
) -> None:
    """Packs as `Codec.pack` does, with 4 bits."""
    _pack(values, residual, scales, codes, np.float32(7), True)


def unpack_8_bits(
    scales: NDArray[np.int16], codes: NDArray[np.uint8], target: Floats, adds: bool
) -> None:
    """Unpacks as `Codec.unpack` does, with 8 bits."""
    _unpack(scales, codes, target, adds, False)


def unpack_4_bits(
    scales: NDArray[np.int16], codes: NDArray[np.uint8], target: Floats, adds: bool
) -> None:
    """Unpacks as `Codec.unpack` does, with 4 bits."""
    _unpack(scales, codes, target, adds, True)
