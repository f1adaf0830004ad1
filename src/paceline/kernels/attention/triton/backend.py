"""FlashAttention-2 on GPUs: what the operator calls.

Checks the tensors, chooses tilings and launches the kernels.
"""

import os

import torch
import triton
from torch import Tensor

from paceline.core.errors import UsageError
from paceline.kernels.attention.layout import empty_like_heads, empty_lse, empty_output
from paceline.kernels.attention.triton.autotune import tuned_tilings
from paceline.kernels.attention.triton.forward import attention_forward_kernel
from paceline.kernels.attention.triton.launch import (
    POINTERS,
    KernelLaunch,
    backward_launches,
    forward_launch,
    table_tilings,
)
from paceline.kernels.attention.triton.tile_sizes import (
    LARGEST_HEAD_DIM,
    Tilings,
)


def triton_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    diagonal: int | None,
    scale: float,
    tilings: Tilings | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the output and the logarithm of each query's sum of exponentials."""
    _require_supported(query)
    tilings = tilings or _tilings_for(query, key, causal=diagonal is not None)
    output = empty_output(query)
    lse = empty_lse(query, "triton")
    if scale < 0:
        # The kernel takes the largest product before it scales.
        query, scale = -query, -scale
    launch = forward_launch(
        *(query, key, value, output, lse),
        diagonal=diagonal,
        scale=scale,
        tiling=tilings.forward,
    )
    _run_beside(query, launch)
    return output, lse


def triton_backward(
    output_gradient: Tensor,
    lse_gradient: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    *,
    diagonal: int | None,
    scale: float,
    tilings: Tilings | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key and value; the same to the bit in every run."""
    _require_supported(query)
    tilings = tilings or _tilings_for(query, key, causal=diagonal is not None)
    gradients = empty_like_heads(query), empty_like_heads(key), empty_like_heads(value)
    launches = backward_launches(
        *(output_gradient, lse_gradient, query, key, value, output, lse, *gradients),
        diagonal=diagonal,
        scale=scale,
        tilings=tilings,
    )
    _run_beside(query, *launches)
    return gradients


def _run_beside(tensor: Tensor, *launches: KernelLaunch) -> None:
    """Runs kernels in this order on the tensor's device, which need not be the current one."""
    with torch.cuda.device_of(tensor):  # type: ignore[no-untyped-call]
        for launch in launches:
            launch.run()


def _require_supported(query: Tensor) -> None:
    if query.dtype not in POINTERS:
        raise UsageError(
            f"the Triton attention does not take {query.dtype}; use float32, float16 or bfloat16, "
            'or backend="sdpa"'
        )
    if query.shape[-1] > LARGEST_HEAD_DIM:
        raise UsageError(
            f"the Triton attention takes heads of up to {LARGEST_HEAD_DIM} numbers, got "
            f'{query.shape[-1]}; use backend="sdpa"'
        )
    if not query.is_cuda and isinstance(attention_forward_kernel, triton.JITFunction):
        raise UsageError(
            f"the Triton attention needs a GPU, but the tensors are on {query.device}; use "
            'backend="sdpa" or "tiled", or set TRITON_INTERPRET=1 before the start to debug'
        )


def _tilings_for(query: Tensor, key: Tensor, *, causal: bool) -> Tilings:
    if os.environ.get("PACELINE_AUTOTUNE") == "1":
        return tuned_tilings(query, key, causal=causal)
    return table_tilings(query)
