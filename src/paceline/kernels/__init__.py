"""Attention: the operation that the model calls, and the oracle that it is tested against."""

from paceline.kernels.attention import attention
from paceline.kernels.attention_reference import attention_reference

__all__ = ["attention", "attention_reference"]
