"""Attention: the operation that the model calls, its backends, and the oracle of its tests."""

from paceline.kernels.attention import (
    BackendChoice,
    attention,
    explain_backend,
    flash_attention,
    resolve_implementation,
)
from paceline.kernels.attention_functions import TiledAttentionFunction, TritonAttentionFunction
from paceline.kernels.attention_reference import attention_reference

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
