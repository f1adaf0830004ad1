"""Arithmetic over frozen specs: parameters, FLOPs, memory. Pure functions, no torch."""

from paceline.accounting.attention import (
    AttentionFlops,
    attention_flops,
    attention_saved_bytes,
    minimum_attention_bytes,
    tiled_attention_peak_bytes,
)
from paceline.accounting.flops import FlopsPerToken, flops_per_token
from paceline.accounting.memory.activations import peak_activation_bytes, saved_for_backward_bytes
from paceline.accounting.memory.model_states import ModelStates, model_state_bytes, parameter_sizes
from paceline.accounting.memory.step import MemoryParts, minimum_step_bytes, step_memory
from paceline.accounting.parameters import ParameterCount, count_parameters

__all__ = [
    "AttentionFlops",
    "FlopsPerToken",
    "MemoryParts",
    "ModelStates",
    "ParameterCount",
    "attention_flops",
    "attention_saved_bytes",
    "count_parameters",
    "flops_per_token",
    "minimum_attention_bytes",
    "minimum_step_bytes",
    "model_state_bytes",
    "parameter_sizes",
    "peak_activation_bytes",
    "saved_for_backward_bytes",
    "step_memory",
    "tiled_attention_peak_bytes",
]
