"""Attention by torch's fused kernel for CPUs, which also returns the log-sum-exp.

The kernel supports one causal mask, whose diagonal starts at the first query and key. Other
diagonals are built from it: queries that see nothing are left out, and keys that every query sees
form a separate block. The outputs of two blocks are combined by their log-sum-exps. Backward of
each block uses the log-sum-exp of the whole, so nothing of size s × s is ever stored.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels.attention.layout import (
    BackwardInputs,
    ForwardInputs,
    Gradients,
    Results,
    empty_gradients,
    empty_lse,
    empty_output,
)
from paceline.kernels.attention.tiled import tiled_backward, tiled_forward

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class MaskBlock(NamedTuple):
    """The queries from `first_query` on, and a range of keys, with or without a causal mask."""

    first_query: int
    first_key: int
    end_key: int
    causal: bool


def plan_blocks(num_queries: int, num_keys: int, diagonal: int | None) -> list[MaskBlock]:
    """Divides the visible pairs into blocks that the kernel supports; none if none are visible."""
    if diagonal is None or diagonal >= num_keys - 1:
        return [MaskBlock(0, 0, num_keys, causal=False)]
    if diagonal <= -num_queries:
        return []
    if diagonal <= 0:
        return [MaskBlock(-diagonal, 0, num_keys, causal=True)]
    if num_queries == 1:
        return [MaskBlock(0, 0, diagonal + 1, causal=False)]
    return [MaskBlock(0, 0, diagonal, causal=False), MaskBlock(0, diagonal, num_keys, causal=True)]


def sdpa_forward(inputs: ForwardInputs) -> Results:
    """Returns the output and the log-sum-exp of each query's scores.

    If the scale is not positive, tiled PyTorch computes them: the kernel multiplies its mask, -inf,
    by the scale.
    """
    if inputs.scale <= 0:
        output, lse = tiled_forward(inputs)
        return output, empty_lse(inputs.query, "sdpa").copy_(lse)
    query, key, value = _with_unit_stride(inputs.query, inputs.key, inputs.value)
    blocks = plan_blocks(query.shape[2], key.shape[2], inputs.diagonal)
    results = [
        _forward(
            query[:, :, block.first_query :],
            key[:, :, block.first_key : block.end_key],
            value[:, :, block.first_key : block.end_key],
            is_causal=block.causal,
            scale=inputs.scale,
        )
        for block in blocks
    ]
    if not blocks or blocks[0].first_query:
        return _below_blind(query, results)
    if len(results) == 2:
        return _mixed(query, results)
    output, lse = results[0]
    return output, lse


def sdpa_backward(inputs: BackwardInputs) -> Gradients:
    """Returns the gradients of query, key and value.

    The kernel does not support a gradient of the log-sum-exp: tiled PyTorch handles that case.
    """
    if inputs.lse_gradient is not None or inputs.scale <= 0:
        return tiled_backward(inputs)
    tensors = inputs.output_gradient, inputs.query, inputs.key, inputs.value, inputs.output
    output_gradient, query, key, value, output = _with_unit_stride(*tensors)

    def block_gradients(block: MaskBlock) -> Gradients:
        seeing = slice(block.first_query, None)
        keys = slice(block.first_key, block.end_key)
        gradients: Gradients = _backward(
            output_gradient[:, :, seeing],
            query[:, :, seeing],
            key[:, :, keys],
            value[:, :, keys],
            output[:, :, seeing],
            inputs.lse[:, :, seeing],
            0.0,
            block.causal,
            scale=inputs.scale,
        )
        return gradients

    blocks = plan_blocks(query.shape[2], key.shape[2], inputs.diagonal)
    if len(blocks) == 1 and blocks[0][:3] == (0, 0, key.shape[2]):
        return block_gradients(blocks[0])
    gradients = empty_gradients(query, key, value)
    for gradient in gradients:
        gradient.zero_()
    for block in blocks:
        keys = slice(block.first_key, block.end_key)
        of_query, of_key, of_value = block_gradients(block)
        gradients[0][:, :, block.first_query :] += of_query
        gradients[1][:, :, keys] = of_key
        gradients[2][:, :, keys] = of_value
    return gradients


def _below_blind(query: Tensor, results: Sequence[Results]) -> Results:
    """Prepends the queries that see nothing to those that do."""
    output = empty_output(query).zero_()
    lse = empty_lse(query, "sdpa").fill_(float("-inf"))
    for seeing_output, seeing_lse in results:
        output[:, :, -seeing_output.shape[2] :] = seeing_output
        lse[:, :, -seeing_output.shape[2] :] = seeing_lse
    return output, lse


def _mixed(query: Tensor, results: Sequence[Results]) -> Results:
    """Combines the outputs over two disjoint sets of keys."""
    (first, first_lse), (second, second_lse) = results
    lse = torch.logaddexp(first_lse, second_lse, out=empty_lse(query, "sdpa"))
    share = (second_lse - lse).exp_().unsqueeze(-1)
    output = empty_output(query)
    output.copy_(torch.lerp(first.to(share.dtype), second.to(share.dtype), share))
    return output, lse


def _with_unit_stride(*tensors: Tensor) -> list[Tensor]:
    """Copies tensors whose head vectors are not contiguous: the kernel would misread them."""
    return [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors]
