"""FlashAttention-2 on GPUs: the functions that the operator calls.

They check the tensors, choose tilings and launch the kernels.
"""

import dataclasses
import os

import torch
import triton
from torch import Tensor

from paceline.core.errors import UsageError
from paceline.kernels.attention.inputs import BackwardInputs, ForwardInputs, Gradients, Results
from paceline.kernels.attention.layout import empty_gradients, empty_lse, empty_output
from paceline.kernels.attention.triton.autotune import tuned_tilings
from paceline.kernels.attention.triton.forward import attention_forward_kernel
from paceline.kernels.attention.triton.launch import (
    POINTERS,
    KernelLaunch,
    backward_launches,
    forward_launch,
    table_tilings,
)
from paceline.kernels.attention.triton.tile_sizes import LARGEST_HEAD_DIM, Tilings


def triton_forward(inputs: ForwardInputs, tilings: Tilings | None = None) -> Results:
    """Returns the output and the log-sum-exp of each query's scores."""
    _require_supported(inputs.query)
    tilings = tilings or _tilings_for(inputs)
    results = empty_output(inputs.query), empty_lse(inputs.query, "triton")
    if inputs.scale < 0:
        # The kernel takes the largest score before scaling, so the scale must not be negative.
        inputs = dataclasses.replace(inputs, query=-inputs.query, scale=-inputs.scale)
    _run(inputs, forward_launch(inputs, results, tilings.forward))
    return results


def triton_backward(inputs: BackwardInputs, tilings: Tilings | None = None) -> Gradients:
    """Returns the gradients of query, key and value; bitwise identical in every run."""
    _require_supported(inputs.query)
    gradients = empty_gradients(inputs.query, inputs.key, inputs.value)
    _run(inputs, *backward_launches(inputs, gradients, tilings or _tilings_for(inputs)))
    return gradients


def _run(inputs: ForwardInputs, *launches: KernelLaunch) -> None:
    """Runs kernels in this order on the inputs' device, which need not be the current one."""
    with torch.cuda.device_of(inputs.query):  # type: ignore[no-untyped-call]
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


def _tilings_for(inputs: ForwardInputs) -> Tilings:
    if os.environ.get("PACELINE_AUTOTUNE") == "1":
        return tuned_tilings(inputs.query, inputs.key, causal=inputs.diagonal is not None)
    return table_tilings(inputs.query)
