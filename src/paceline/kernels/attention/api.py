"""Attention whose memory grows linearly with the sequence: one function over several backends.

Torch's fused attention (SDPA) computes it. On CUDA, the Triton kernels of this package do if they
are requested, or if the self-test found them right and faster on that very device. Tiled PyTorch is
available on request, and computes log-sum-exps where SDPA returns none. `explain_backend` returns
the backend that will be used, and why. A requested backend that cannot run is an error that says
what to do.
"""

import dataclasses
import functools
import importlib.util
from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.errors import UsageError
from paceline.core.specs import AttentionImplementation, AttentionKind, require_choice
from paceline.kernels.attention.layout import CausalAlign, causal_diagonal, default_scale
from paceline.kernels.attention.op import BackendName, attention_op
from paceline.kernels.attention.reference import attention_reference
from paceline.kernels.attention.self_test import objection_to_triton
from paceline.kernels.attention.triton.tile_sizes import LARGEST_HEAD_DIM

AttentionBackend = Literal["auto", "sdpa", "tiled", "triton"]

_DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_OLDEST_CAPABILITY = (8, 0)


@dataclasses.dataclass(frozen=True)
class BackendChoice:
    """Which backend computes attention, and why."""

    backend: BackendName
    """Name of the backend."""
    reason: str
    """Why it was chosen, in words."""

    def __str__(self) -> str:
        return f"{self.backend}: {self.reason}"


def explain_backend(
    device: torch.device | str,
    *,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 64,
    return_lse: bool = False,
    backend: AttentionBackend = "auto",
) -> BackendChoice:
    """Returns which backend `flash_attention` uses for such tensors, and why.

    Args:
        device: Where the tensors are.
        dtype: Their dtype.
        head_dim: Width of a head.
        return_lse: Whether the log-sum-exps are returned, too.
        backend: The requested backend; auto lets Paceline choose.
    """
    require_choice("attention", "backend", backend, AttentionBackend)
    if backend != "auto":
        return BackendChoice(backend, "it was asked for")
    device = torch.device(device)
    if device.type == "cpu":
        return BackendChoice("sdpa", "on CPUs torch's fused kernel is the fastest; Triton has none")
    objection = _objection_to_triton(device, dtype, head_dim)
    if objection is None:
        reason = "the self-test found the Triton kernels right and faster than SDPA on this device"
        return BackendChoice("triton", reason)
    if return_lse:
        return BackendChoice(
            "tiled", f"SDPA on {device.type!r} does not return log-sum-exps, and {objection}"
        )
    return BackendChoice("sdpa", objection)


def _objection_to_triton(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Returns why `auto` does not choose the Triton kernels; None if it does."""
    if device.type != "cuda":
        return f"there are no kernels of ours for {device.type!r}"
    if dtype == torch.float64:
        return "the Triton kernels cannot be used: they do not compute in float64"
    if head_dim > LARGEST_HEAD_DIM:
        return (
            "the Triton kernels cannot be used: they take heads of up to "
            f"{LARGEST_HEAD_DIM} numbers, these have {head_dim}"
        )
    return _objection_on_device(device)


def _objection_on_device(device: torch.device) -> str | None:
    obstacle = triton_obstacle(device)
    if obstacle is not None:
        return f"the Triton kernels cannot be used: {obstacle}"
    return objection_to_triton(device)


# Equivalent to torch.compiler.assume_constant_result: the compiler shall not trace the look at the
# device and at files. The decorator itself imports the compiler, which would delay every program by
# more than a second. The compiler would ignore the mark on a function with a cache.
_objection_on_device._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache  # Called in every layer of every step.
def triton_obstacle(device: torch.device) -> str | None:
    """Returns why the Triton kernels cannot run on a CUDA device; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed; pip install 'paceline[triton]'"
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability < _OLDEST_CAPABILITY:
        return f"they need compute capability 8.0, this device has {'.'.join(map(str, capability))}"
    return None


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
        key: (batch, kv_heads, keys, head_dim); each head may serve a group of query heads.
        value: As key.
        causal: Whether a query sees only keys up to its own position.
        scale: Factor of the scores; 1 / sqrt(head_dim) by default.
        causal_align: Alignment of the mask if lengths differ: top_left aligns the first query with
            the first key, bottom_right the last query with the last key, as in generation with a
            cache. A query that sees no key gets zeros.
        return_lse: Also return the log-sum-exp of each query's scores, (batch, heads, queries), in
            float32, or in float64 for float64 inputs. It is differentiable, and can be used to
            combine outputs over parts of the keys.
        backend: Backend to use; `explain_backend` says what auto selects.
    """
    _validate(query, key, value)
    chosen = explain_backend(
        query.device,
        dtype=query.dtype,
        head_dim=query.shape[-1],
        return_lse=return_lse,
        backend=backend,
    ).backend
    diagonal = causal_diagonal(query.shape[-2], key.shape[-2], causal=causal, align=causal_align)
    if chosen == "sdpa" and query.device.type != "cpu":
        if return_lse:
            raise UsageError(
                f"attention: torch's fused attention on {query.device.type!r} does not return "
                'the logarithms of the sums; use backend="triton" or "tiled", or return_lse=False'
            )
        return _torch_attention(query, key, value, diagonal, scale)
    output, lse = attention_op(query, key, value, diagonal, default_scale(query, scale), chosen)
    return (output, lse) if return_lse else output


def resolve_implementation(
    implementation: AttentionImplementation, device: torch.device | str
) -> AttentionKind:
    """Returns the implementation of attention that a model uses on a device.

    Args:
        implementation: As in the model's configuration; auto selects a backend.
        device: The device that it runs on.
    """
    if implementation == "naive":
        return "naive"
    return explain_backend(device, backend=implementation).backend


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool,
    causal_align: CausalAlign = "top_left",
    implementation: AttentionImplementation,
) -> Tensor:
    """Computes attention with the implementation named in the model's configuration.

    Args:
        query: (batch, heads, queries, head_dim).
        key: (batch, key heads, keys, head_dim).
        value: As the keys.
        causal: Whether a query sees only the keys up to its own position.
        causal_align: Alignment of the mask if lengths differ, as in `flash_attention`.
        implementation: A backend of `flash_attention`, or naive, which stores all scores.
    """
    if implementation != "naive":
        return flash_attention(
            query, key, value, causal=causal, causal_align=causal_align, backend=implementation
        )
    if query.shape[1] != key.shape[1]:
        group = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(group, dim=1)
        value = value.repeat_interleave(group, dim=1)
    return attention_reference(query, key, value, causal=causal, causal_align=causal_align)


def _torch_attention(
    query: Tensor, key: Tensor, value: Tensor, diagonal: int | None, scale: float | None
) -> Tensor:
    """Computes attention with the kernel that torch chooses; in float64 it stores the scores."""
    # torch would return NaN for queries that see no key.
    num_blind = 0 if diagonal is None else max(0, -diagonal)
    if scale is not None and scale <= 0:
        # Some of torch's kernels multiply the mask, -inf, by the scale.
        query, scale = query * scale, 1.0
    mask: Tensor | None = None
    if diagonal is not None and diagonal > 0:
        mask = _lower_right_mask(query, key, diagonal)
    # While compiling, sizes are symbols, and only a branch makes a bool of their comparison.
    grouped = {"enable_gqa": True} if query.shape[1] != key.shape[1] else {}
    output = F.scaled_dot_product_attention(
        query[:, :, num_blind:],
        key,
        value,
        attn_mask=mask,
        is_causal=diagonal is not None and mask is None,
        scale=scale,
        **grouped,
    )
    return F.pad(output, (0, 0, num_blind, 0)) if num_blind else output


def _lower_right_mask(query: Tensor, key: Tensor, diagonal: int) -> Tensor:
    """Returns the causal mask that aligns the last query with the last key."""
    num_queries, num_keys = query.shape[-2], key.shape[-2]
    if torch.compiler.is_compiling():
        # The compiler cannot trace torch's own mask, which stores nothing.
        visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
        return visible.tril(diagonal)
    from torch.nn.attention.bias import causal_lower_right  # Imports the whole compiler.

    mask: Tensor = causal_lower_right(num_queries, num_keys)
    return mask


def _validate(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raises if the tensors do not match; runs in every call, so it must be fast."""
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
    elif query.shape[3] == 0:
        problem = "head_dim must be at least 1"
    elif not {query.dtype, key.dtype, value.dtype} <= _DTYPES:
        known = ", ".join(sorted(str(dtype) for dtype in _DTYPES))
        problem = f"the dtypes must be of {known}"
    elif not query.dtype == key.dtype == value.dtype and not _may_be_cast(query, key, value):
        problem = "the tensors must have one dtype; convert them, or use torch.autocast"
    else:
        return
    got = "; ".join(
        f"{name} {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
        for name, tensor in (("query", query), ("key", key), ("value", value))
    )
    raise UsageError(f"attention: {problem}, got {got}")


def _may_be_cast(*tensors: Tensor) -> bool:
    """Returns whether autocast gives all tensors one dtype; it leaves float64 unchanged."""
    device_type = tensors[0].device.type
    return (
        torch.amp.is_autocast_available(device_type)
        and torch.is_autocast_enabled(device_type)
        and all(tensor.dtype != torch.float64 for tensor in tensors)
    )
