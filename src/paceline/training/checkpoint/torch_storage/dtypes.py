"""Safetensors names of torch's dtypes."""

from typing import Any

import torch
from torch import Tensor

from paceline.training.checkpoint.errors import CheckpointError

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def dtype_name(dtype: torch.dtype, tensor_name: str) -> str:
    """Returns the safetensors name of a dtype.

    Args:
        dtype: dtype of a tensor.
        tensor_name: Name of the tensor, for the error.
    """
    if dtype not in _NAMES:
        raise CheckpointError(
            f"{tensor_name}: safetensors does not support {dtype}; convert the tensor before saving"
        )
    return _NAMES[dtype]


def dtype_of(name: str) -> torch.dtype:
    """Returns the dtype with a safetensors name."""
    return _DTYPES[name]


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor on the CPU."""
    content: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(content)
