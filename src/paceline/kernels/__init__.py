"""Attention: the operation that the model calls, its backends, and a reference for its tests."""

from paceline.kernels.attention.api import (
    BackendChoice,
    attention,
    explain_backend,
    flash_attention,
    resolve_implementation,
)
from paceline.kernels.attention.op import TiledAttentionFunction, TritonAttentionFunction
from paceline.kernels.attention.reference import attention_reference

__all__ = [
    "BackendChoice",
    "TiledAttentionFunction",
    "TritonAttentionFunction",
    "attention",
    "attention_reference",
    "explain_backend",
    "flash_attention",
    "resolve_implementation",
]
