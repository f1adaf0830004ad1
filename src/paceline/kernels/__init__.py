"""Attention: the operation that the model calls, and the oracle that it is tested against."""

from paceline.kernels.attention import AttentionImplementation, attention
from paceline.kernels.attention_reference import attention_reference

__all__ = ["AttentionImplementation", "attention", "attention_reference"]
