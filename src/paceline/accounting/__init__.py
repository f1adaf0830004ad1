"""Arithmetic over frozen specs: parameters, FLOPs, memory. Pure functions, no torch."""

from paceline.accounting.flops import FlopsPerToken, flops_per_token
from paceline.accounting.memory import minimum_attention_bytes, minimum_step_bytes
from paceline.accounting.parameters import ParameterCount, count_parameters

__all__ = [
    "FlopsPerToken",
    "ParameterCount",
    "count_parameters",
    "flops_per_token",
    "minimum_attention_bytes",
    "minimum_step_bytes",
]
