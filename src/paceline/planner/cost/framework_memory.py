"""What frameworks hold beyond the formulas: how they recompute, what they keep, and constants.

A device holds at its peak

    states + activations + working + constant + gaps min(activations + working, most),

where the constant is what drivers, communication libraries and buffers of fixed size take, and the
gaps are what the allocator holds between blocks of unequal size, which stop growing at some point.
Both are fitted to published peaks (`scripts/planner_memory.py`), the rest is read from the
frameworks' code:

    odd matmuls       selective recomputation of torchtitan keeps the results of every other matmul
                      (query, value, gate, down) and of attention, beside the block's input
    step buffers      DeepSpeed copies the gradients that a rank owns to float32 for its update
    low gradients     DeepSpeed's bf16 optimizer keeps 16-bit gradients beside those in float32
    stays gathered    torch's FSDP gathers the weights of a pipeline stage once in a step
    fused             a norm keeps its input and output, a gate no result of its activation function
    float8 inputs     Transformer Engine keeps inputs of matmuls in float8, one byte each
    whole sequences   sequence parallelism without fused matmuls passes eight tensors of all tokens
                      through a block: two gathered inputs, two partial outputs, their gradients
"""

import dataclasses
import math
from typing import Literal

from paceline.core.hardware import Device
from paceline.core.units import GB, GIB

_USABLE = 0.99
"""nvidia-smi shows 81,251 to 81,920 MiB on devices of 80 GB."""
GB_OF_NVIDIA_SMI = 1000 * 2**20
"""Bytes of a "GB" that was read off nvidia-smi, which prints MiB."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrameworkMemory:
    """What one framework's ranks hold beside what their layout says."""

    constant_bytes: float = 0.0
    """Drivers, communication libraries, buffers of fixed size."""
    gaps: float = 0.0
    """What the allocator holds without giving it out, as a share of activations."""
    most_with_gaps: float = math.inf
    """Bytes of activations from which on these gaps do not grow."""
    step_bytes: int = 0
    """Bytes per parameter of a rank's part of the optimizer, while it updates."""
    low_gradient_bytes: int = 0
    """Bytes per parameter of gradients in the compute dtype beside accumulated ones."""
    logit_bytes: int = 12
    """Bytes per token and word that the loss holds: float32 log-probabilities and two gradients."""
    selective: Literal["scores", "odd matmuls"] = "scores"
    """What selective recomputation computes again: attention's scores, or all but odd matmuls."""
    stays_gathered: bool = False
    """Whether a fully sharded stage of a pipeline is gathered once in a step."""
    fused: bool = False
    """Whether norms and gates are single kernels, which keep only what their backward needs."""
    float8_inputs: bool = False
    """Whether inputs of matmuls are kept in float8."""
    whole_sequences: int = 0
    """Tensors of all tokens that sequence parallelism holds in a block, beside its share."""


PLAIN = FrameworkMemory()
"""The formulas alone."""

_MEGATRON = FrameworkMemory(fused=True, logit_bytes=8)
"""bf16 logits, their float32 softmax, and gradients that take the place of the logits."""
_DEEPSPEED = FrameworkMemory(constant_bytes=5.93e9, gaps=0.557, most_with_gaps=16e9, step_bytes=4)
"""Fitted to the 94 peaks of BLOOM's search for a layout."""
_FRAMEWORKS: dict[str, dict[str, FrameworkMemory]] = {
    "bloom": {"": _DEEPSPEED, "bfloat16": dataclasses.replace(_DEEPSPEED, low_gradient_bytes=2)},
    "torchtitan": {
        "": FrameworkMemory(
            selective="odd matmuls", logit_bytes=14, stays_gathered=True, whole_sequences=8
        )
    },
    # Its loss is one kernel on 16-bit logits.
    "llm-foundry": {"": FrameworkMemory(logit_bytes=4)},
    **{
        family: {"": _MEGATRON, "float8": dataclasses.replace(_MEGATRON, float8_inputs=True)}
        for family in ("nemo", "megatron-core", "megatron-bridge", "megatron-2023")
    },
}


def find_framework_memory(family: str, dtype: str) -> FrameworkMemory:
    """Returns what a framework holds in training with matmuls in `dtype`; nothing if not known."""
    variants = _FRAMEWORKS.get(family, {})
    return variants.get(dtype, variants.get("", PLAIN))


def usable_bytes(device: Device) -> float:
    """Returns what processes can have of a device's memory: vendors' GB of HBM are GiB, 1% kept."""
    return device.memory_bytes.value / GB * GIB * _USABLE
