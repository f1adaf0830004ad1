"""Attention whose memory grows linearly with the sequence: one function over several backends.

On CUDA the Triton kernels of this room compute it, elsewhere torch's fused attention; tiled
PyTorch does so on request. A backend that cannot is an error that says why and what to do, never
a silent change to another: `explain_backend` tells beforehand which one it will be.
"""

import dataclasses
import importlib.util
from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.errors import UsageError
from paceline.core.specs import AttentionImplementation
from paceline.kernels.attention_layout import CausalAlign, causal_diagonal, default_scale
from paceline.kernels.attention_op import attention_op
from paceline.kernels.attention_reference import attention_reference

AttentionBackend = Literal["auto", "sdpa", "tiled", "triton"]

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackendChoice:
    """Which backend computes attention, and why."""

    backend: Literal["sdpa", "tiled", "triton"]
    reason: str

    def __str__(self) -> str:
        return f"{self.backend}: {self.reason}"


def explain_backend(
    device: torch.device | str, *, backend: AttentionBackend = "auto"
) -> BackendChoice:
    """Says which backend `flash_attention` uses for tensors on a device, and why."""
    device_type = torch.device(device).type
    if backend != "auto":
        return BackendChoice(backend=backend, reason="it was asked for")
    if device_type == "cuda":
        return BackendChoice(
            backend="triton", reason="on CUDA devices the Triton kernels compute attention"
        )
    if device_type == "cpu":
        return BackendChoice(
            backend="sdpa", reason="on CPUs torch's fused kernel is the fastest; Triton has none"
        )
    return BackendChoice(
        backend="sdpa", reason=f"there are no kernels of ours for {device_type!r}, torch has some"
    )


@overload
def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    causal_align: CausalAlign = "top_left",
    return_lse: Literal[False] = False,
    backend: AttentionBackend = "auto",
) -> Tensor: ...


@overload
def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    causal_align: CausalAlign = "top_left",
    return_lse: Literal[True],
    backend: AttentionBackend = "auto",
) -> tuple[Tensor, Tensor]: ...


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    causal_align: CausalAlign = "top_left",
    return_lse: bool = False,
    backend: AttentionBackend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes softmax(scale Q Kᵀ) V without ever storing the scores.

    Args:
        query: (batch, heads, queries, head_dim).
        key: (batch, kv_heads, keys, head_dim); each of fewer heads serves a group of queries'.
        value: As key.
        causal: Whether a query sees only keys up to its own position.
        scale: What scores are multiplied with; 1 / sqrt(head_dim) unless given.
        causal_align: Where lengths differ: top_left lets the first query see the first key,
            bottom_right the last query the last key, as in generation with a cache. A query
            that sees no key gets zeros.
        return_lse: Also return the logarithm of each query's sum of exponentials, (batch, heads,
            queries) in float32; it can be differentiated, and joins outputs over parts of keys.
        backend: What computes it; `explain_backend` says what auto means.
    """
    _validate(query, key, value)
    chosen = explain_backend(query.device, backend=backend).backend
    if chosen == "sdpa" and query.device.type != "cpu":
        if return_lse:
            raise UsageError(
                f"attention: torch's fused attention on {query.device.type!r} does not return "
                'the logarithms of the sums; use backend="triton" or "tiled", or return_lse=False'
            )
        return _torch_attention(query, key, value, causal, scale, causal_align)
    if chosen == "triton":
        _require_triton()
    diagonal = causal_diagonal(query.shape[-2], key.shape[-2], causal=causal, align=causal_align)
    output, lse = attention_op(query, key, value, diagonal, default_scale(query, scale), chosen)
    return (output, lse) if return_lse else output


def resolve_implementation(
    implementation: AttentionImplementation, device: torch.device | str
) -> Literal["sdpa", "tiled", "triton", "naive"]:
    """Returns what a model's implementation of attention comes down to on a device."""
    if implementation == "naive":
        return "naive"
    return explain_backend(device, backend=implementation).backend


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool,
    implementation: AttentionImplementation,
) -> Tensor:
    """Computes attention as the model's configuration names it: naive stores all scores."""
    if implementation != "naive":
        return flash_attention(query, key, value, causal=causal, backend=implementation)
    if query.shape[1] != key.shape[1]:
        group = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(group, dim=1)
        value = value.repeat_interleave(group, dim=1)
    return attention_reference(query, key, value, causal=causal)


def _torch_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    scale: float | None,
    causal_align: CausalAlign,
) -> Tensor:
    """Lets torch choose among its fused kernels for the device."""
    from torch.nn.attention.bias import causal_lower_right  # It loads the whole compiler.

    lengths = query.shape[-2], key.shape[-2]
    below_right = causal and causal_align == "bottom_right" and lengths[0] != lengths[1]
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=causal_lower_right(*lengths) if below_right else None,
        is_causal=causal and not below_right,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _validate(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raises where the tensors do not fit; it is on the way of every call, so it is quick."""
    if not query.ndim == key.ndim == value.ndim == 4:
        problem = "each tensor must be (batch, heads, sequence, head_dim)"
    elif key.shape != value.shape:
        problem = "key and value must have the same shape"
    elif query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        problem = "batch and head_dim must agree"
    elif key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        problem = "the query's heads must be a multiple of the key's"
    elif not query.device == key.device == value.device:
        problem = "the tensors must be on one device"
    elif query.dtype not in _DTYPES:
        known = ", ".join(str(dtype) for dtype in _DTYPES)
        problem = f"the format must be one of {known}"
    elif not query.dtype == key.dtype == value.dtype and not torch.is_autocast_enabled(
        query.device.type
    ):
        problem = "the tensors must have one format; convert them, or use torch.autocast"
    else:
        return
    got = "; ".join(
        f"{name} {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
        for name, tensor in (("query", query), ("key", key), ("value", value))
    )
    raise UsageError(f"attention: {problem}, got {got}")


def _require_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        raise UsageError(
            "attention: the Triton backend needs the package triton: pip install "
            '\'paceline[triton]\', or use backend="sdpa" or "tiled"'
        )
