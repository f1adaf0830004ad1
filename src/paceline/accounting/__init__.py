"""Arithmetic over frozen specs: parameters, FLOPs, memory. Pure functions, no torch."""

from paceline.accounting.attention import attention_saved_bytes
from paceline.accounting.counts import count_parameters, flops_per_token
from paceline.accounting.memory.activations import peak_activation_bytes
from paceline.accounting.memory.model_states import model_state_bytes
from paceline.accounting.memory.step import minimum_step_bytes, step_memory

__all__ = [
    "attention_saved_bytes",
    "count_parameters",
    "flops_per_token",
    "minimum_step_bytes",
    "model_state_bytes",
    "peak_activation_bytes",
    "step_memory",
]
