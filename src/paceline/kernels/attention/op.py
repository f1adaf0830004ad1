"""Attention and its backward as torch operators, so that all of torch can handle them.

This module registers what autograd, torch.compile and autocast need: a derivative, the shapes of
the results without computing them, and the dtype that inputs are cast to. The operators use the
backend that they are given; they do not choose one.

They are defined through `torch.library.Library` because `torch.library.custom_op`, which does the
same in fewer lines, adds 0.15 ms to a call: 2% of attention over 1,024 tokens.

The courses' tests call two autograd functions instead, which stand at the end. Both are applied as
``apply(query, key, value, is_causal)`` to (batch, sequence, head_dim). Of the tensors that they
save for backward, exactly one, the log-sum-exp, is (batch, queries). For any other purpose prefer
`flash_attention`: autocast, for example, does not apply inside an autograd function.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paceline.core.errors import UsageError
from paceline.core.specs import require_choice
from paceline.kernels.attention.layout import (
    BackwardInputs,
    ForwardInputs,
    Gradients,
    Results,
    causal_diagonal,
    default_scale,
    empty_gradients,
    empty_lse,
    empty_output,
)

BackendName = Literal["sdpa", "tiled", "triton"]


class Backend(NamedTuple):
    """The functions that compute both passes."""

    forward: Callable[[ForwardInputs], Results]
    backward: Callable[[BackwardInputs], Gradients]


def find_backend(name: str) -> Backend:
    """Returns the backend of that name; each is imported on first use."""
    require_choice("attention", "backend", name, BackendName)
    if name == "triton":
        try:
            from paceline.kernels.attention.triton.backend import triton_backward, triton_forward
        except ModuleNotFoundError as error:
            raise UsageError(
                "attention: the Triton backend needs the package triton: pip install "
                '\'paceline[triton]\', or use backend="sdpa" or "tiled"'
            ) from error
        return Backend(triton_forward, triton_backward)
    if name == "tiled":
        from paceline.kernels.attention.tiled import tiled_backward, tiled_forward

        return Backend(tiled_forward, tiled_backward)
    from paceline.kernels.attention.sdpa import sdpa_backward, sdpa_forward

    return Backend(sdpa_forward, sdpa_backward)


_LIBRARY = torch.library.Library("paceline", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "attention(Tensor query, Tensor key, Tensor value, SymInt? diagonal, float scale, str backend)"
    " -> (Tensor output, Tensor lse)",
    tags=torch.Tag.pt2_compliant_tag,
)
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "attention_backward(Tensor output_gradient, Tensor? lse_gradient, Tensor query, Tensor key, "
    "Tensor value, Tensor output, Tensor lse, SymInt? diagonal, float scale, str backend)"
    " -> (Tensor query_gradient, Tensor key_gradient, Tensor value_gradient)",
    tags=torch.Tag.pt2_compliant_tag,
)
attention_op = torch.ops.paceline.attention.default
"""Returns the output and the log-sum-exp of each query's scores."""
attention_backward_op = torch.ops.paceline.attention_backward.default
"""Returns the gradients of query, key and value."""


def attend(inputs: ForwardInputs, backend: str) -> Results:
    """Computes the first operator; empty inputs need no backend."""
    query = inputs.query
    if query.numel() == 0 or inputs.key.numel() == 0:
        return empty_output(query).zero_(), empty_lse(query, backend).fill_(float("-inf"))
    return find_backend(backend).forward(inputs)


def attend_backward(inputs: BackwardInputs, backend: str) -> Gradients:
    """Computes the second operator; empty inputs need no backend."""
    if inputs.query.numel() == 0 or inputs.key.numel() == 0:
        gradients = empty_gradients(inputs.query, inputs.key, inputs.value)
        for gradient in gradients:
            gradient.zero_()
        return gradients
    return find_backend(backend).backward(inputs)


# Torch calls the following functions with the arguments of the schemas above; they build the input
# dataclasses. The order of the arguments must not change: torch.compile caches graphs on disk that
# call the backward operator, and looks them up by the forward graph alone.


def _attend(*inputs_and_backend: Any) -> Results:
    *inputs, backend = inputs_and_backend
    return attend(ForwardInputs(*inputs), backend)


def _attend_backward(*inputs_and_backend: Any) -> Gradients:
    output_gradient, lse_gradient, query, key, value, *others = inputs_and_backend
    output, lse, diagonal, scale, backend = others
    upstream = output, lse, output_gradient, lse_gradient
    return attend_backward(BackwardInputs(query, key, value, diagonal, scale, *upstream), backend)


def _shapes_of_results(query: Tensor, *others: Any) -> Results:
    return empty_output(query), empty_lse(query, others[-1])


def _shapes_of_gradients(*inputs_and_backend: Any) -> Gradients:
    return empty_gradients(*inputs_and_backend[2:5])


def _keep_for_backward(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.diagonal, ctx.scale, ctx.backend = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _propagate(ctx, output_gradient, lse_gradient):  # type: ignore[no-untyped-def]
    query, key, value, output, lse = ctx.saved_tensors
    if output_gradient is None:
        output_gradient = torch.zeros_like(output)
    gradients = attention_backward_op(
        *(output_gradient, lse_gradient, query, key, value, output, lse),
        *(ctx.diagonal, ctx.scale, ctx.backend),
    )
    return *gradients, None, None, None


def _cast_and_attend(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Results:
    """Casts to the dtype of autocast, then attends; like torch, it leaves float64 unchanged."""
    device_type = query.device.type
    dtype = torch.get_autocast_dtype(device_type)
    with torch.autocast(device_type, enabled=False):
        cast = (
            tensor if tensor.dtype == torch.float64 else tensor.to(dtype)
            for tensor in (query, key, value)
        )
        results: Results = attention_op(*cast, *options)
        return results


_LIBRARY.impl("attention", _attend, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_LIBRARY.impl(  # type: ignore[no-untyped-call]
    "attention_backward", _attend_backward, "CompositeExplicitAutograd"
)
for _key in ("AutocastCPU", "AutocastCUDA", "AutocastXPU", "AutocastMPS"):
    _LIBRARY.impl("attention", _cast_and_attend, _key)  # type: ignore[no-untyped-call]
torch.library.register_fake("paceline::attention", _shapes_of_results, lib=_LIBRARY)
torch.library.register_fake("paceline::attention_backward", _shapes_of_gradients, lib=_LIBRARY)
torch.library.register_autograd(
    "paceline::attention", _propagate, setup_context=_keep_for_backward, lib=_LIBRARY
)


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
