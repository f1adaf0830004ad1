"""FlashAttention-2 as the two autograd functions that the courses' tests call.

Both are applied as ``apply(query, key, value, is_causal)`` to (batch, sequence, head_dim). Of the
tensors that they save for backward, exactly one, the log-sum-exp, is (batch, queries). For any
other purpose prefer `flash_attention`: autocast, for example, does not apply inside an autograd
function.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paceline.kernels.attention.inputs import BackwardInputs, ForwardInputs
from paceline.kernels.attention.layout import causal_diagonal, default_scale
from paceline.kernels.attention.op import BackendName, attend, attend_backward


class _AttentionFunction(torch.autograd.Function):
    """Attention of a single head, computed by the backend of the subclass."""

    backend: ClassVar[BackendName]

    @classmethod
    def forward(
        cls, ctx: Any, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False
    ) -> Tensor:
        """Computes the output."""
        num_queries, num_keys = query.shape[-2], key.shape[-2]
        ctx.options = (
            causal_diagonal(num_queries, num_keys, causal=is_causal, align="top_left"),
            default_scale(query, None),
        )
        heads = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        results = attend(ForwardInputs(*heads, *ctx.options), cls.backend)
        output, lse = (result.squeeze(1) for result in results)
        ctx.save_for_backward(query, key, value, output, lse)
        return output

    @classmethod
    @once_differentiable
    def backward(cls, ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Computes the gradients of query, key and value."""
        query, key, value, output, lse = (tensor.unsqueeze(1) for tensor in ctx.saved_tensors)
        diagonal, scale = ctx.options
        inputs = BackwardInputs(
            *(query, key, value, diagonal, scale), output, lse, output_gradient.unsqueeze(1), None
        )
        gradients = attend_backward(inputs, cls.backend)
        return *(gradient.squeeze(1) for gradient in gradients), None


class TiledAttentionFunction(_AttentionFunction):
    """Attention by tiles in PyTorch."""

    backend = "tiled"


class TritonAttentionFunction(_AttentionFunction):
    """Attention by the Triton kernels."""

    backend = "triton"
