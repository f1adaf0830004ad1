"""Enables Triton's interpreter, which runs kernels on a CPU; import this before any kernel.

The interpreter stores bf16 numbers as 16-bit integers, computes with them as integers, and
truncates when casting to bf16. This module repairs that: matmuls widen bf16 first, casts round to
nearest even as on GPUs, and all other bf16 arithmetic is an error. On a machine with a GPU nothing
is interpreted, and the same tests run on `DEVICE`.
"""

import os
from typing import Any

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    # Triton reads this when it defines its own functions, that is, when it is first imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


def _widen(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _round(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    with np.errstate(over="ignore"):
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(numbers), 0x7FC0, nearest).astype(np.uint16)


def _repair_bfloat16() -> None:
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast_impl = InterpreterBuilder.cast_impl
    create_dot = InterpreterBuilder.create_dot
    binary_op = InterpreterBuilder.binary_op

    def cast(self: Any, source: Any, target: Any) -> Any:
        formats = source.dtype.scalar, target.scalar
        if formats == (tl.bfloat16, tl.float32):
            return TensorHandle(_widen(source.data), tl.float32)
        if formats == (tl.float32, tl.bfloat16):
            return TensorHandle(_round(source.data), tl.bfloat16)
        return cast_impl(self, source, target)

    def dot(self: Any, left: Any, right: Any, *others: Any) -> Any:
        widened = (
            TensorHandle(_widen(factor.data), tl.float32)
            if factor.dtype.scalar == tl.bfloat16
            else factor
            for factor in (left, right)
        )
        return create_dot(self, *widened, *others)

    def arithmetic(self: Any, left: Any, right: Any, operation: Any) -> Any:
        assert tl.bfloat16 not in (left.dtype.scalar, right.dtype.scalar), "arithmetic in bfloat16"
        return binary_op(self, left, right, operation)

    InterpreterBuilder.cast_impl = cast
    InterpreterBuilder.create_dot = dot
    InterpreterBuilder.binary_op = arithmetic


if DEVICE == "cpu":
    if isinstance(tl.sum, triton.JITFunction):
        pytest.fail(
            "triton was imported before TRITON_INTERPRET was set; set it to 1 for the whole run",
            pytrace=False,
        )
    _repair_bfloat16()
