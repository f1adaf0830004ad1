"""Operators that CUDA fuses, fused on the emulated device too, so that its peaks are those of CUDA.

torch composes these of several operators on devices that have no kernel of their own. The results
are the same, but the parts of the composition save and allocate more:

    rms_norm              saves its input and one number per row, not also the normalized input
    silu_backward         allocates its result only
    attention             saves queries, keys, values, output and one number per query, not scores;
                          its output is laid out as its queries are, as that of FlashAttention

A kernel here allocates what the fused one returns, and no more than a number per row besides.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey

_ops: Any = torch.ops.aten
_registered: list[torch.library.Library] = []


def register() -> None:
    """Registers the kernels, for the rest of this process."""
    if _registered:
        return
    library = torch.library.Library("aten", "IMPL")
    _registered.append(library)
    kernels: dict[str, Callable[..., Any]] = {
        "_fused_rms_norm": _rms_norm,
        "_fused_rms_norm_backward": _rms_norm_backward,
        "silu_backward": _silu_backward,
    }
    for name, kernel in kernels.items():
        library.impl(name, kernel, DispatchKey.PrivateUse1.name)
    # Composite: what it calls has the derivative.
    library.impl("scaled_dot_product_attention", _attention, DispatchKey.AutogradPrivateUse1.name)


def _rms_norm(
    x: Tensor, shape: list[int], weight: Tensor | None, epsilon: float | None
) -> tuple[Tensor, Tensor]:
    squared = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(shape[-1])
    root = squared.add_(torch.finfo(x.dtype).eps if epsilon is None else epsilon).rsqrt_()
    output = x * root
    return output if weight is None else output.mul_(weight), root


def _rms_norm_backward(
    gradient: Tensor,
    x: Tensor,
    shape: list[int],
    root: Tensor,
    weight: Tensor | None,
    wanted: list[bool],
) -> tuple[Tensor | None, Tensor | None]:
    width = shape[-1]
    rows, per_row = x.reshape(-1, width), root.reshape(-1, 1)
    given = gradient.reshape(-1, width)
    result = torch.mul(rows, per_row)  # The normalized input, until it is overwritten.
    of_weight = None
    if weight is not None and wanted[1]:
        of_weight = torch.bmm(given.t().unsqueeze(1), result.t().unsqueeze(2)).view(width)
    if not wanted[0]:
        return None, of_weight
    torch.mul(given, 1.0 if weight is None else weight, out=result)
    share = torch.bmm(result.unsqueeze(1), rows.unsqueeze(2)).view(-1, 1)
    share.mul_(per_row).mul_(per_row).mul_(per_row).div_(-width)
    return result.mul_(per_row).addcmul_(rows, share).view(x.shape), of_weight


def _silu_backward(gradient: Tensor, x: Tensor) -> Tensor:
    # The overload with a place for the result has a kernel, which runs in the stream.
    result: Tensor = _ops.silu_backward.grad_input(gradient, x, grad_input=torch.empty_like(x))
    return result


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if enable_gqa and query.shape[1] != key.shape[1]:
        raise NotImplementedError("the fused stand-in has as many key heads as query heads")
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        # CUDA masks inside the kernel; a CPU's kernel adds a mask of the queries' dtype.
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(
            ~attn_mask, -torch.inf
        )
    output: Tensor = _ops._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    return output
