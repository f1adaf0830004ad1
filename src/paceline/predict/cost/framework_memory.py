"""Framework-specific memory: recomputation, kept tensors and constant overhead.

The peak memory of a device is

    states + activations + working + constant + gaps min(activations + working, most),

where the constant covers drivers, communication libraries and buffers of fixed size, and the gaps
are allocator fragmentation, which stops growing at `most`. Both are fitted to published peaks
(`studies/planner/memory.py`). The rest comes from the frameworks' code:

    odd matmuls       torchtitan's selective recomputation keeps the outputs of attention and of
                      every other matmul (query, value, gate, down), and the block's input
    step buffers      DeepSpeed copies the gradients that a rank owns to float32 for its update
    low gradients     DeepSpeed's bf16 optimizer keeps bf16 gradients in addition to float32 ones
    stays gathered    torch's FSDP gathers the weights of a pipeline stage once per step
    fused             a norm keeps its input and output; a gate keeps no activation function output
    float8 inputs     Transformer Engine keeps inputs of matmuls in float8, one byte each
    whole sequences   sequence parallelism without fused matmuls holds eight full-sequence tensors
                      per block: two gathered inputs, two partial outputs, their gradients
"""

import dataclasses
import math
from typing import Literal

from paceline.core.hardware import Device
from paceline.core.units import GB, GIB

_USABLE = 0.99
"""nvidia-smi shows 81,251 to 81,920 MiB on devices of 80 GB."""
GB_OF_NVIDIA_SMI = 1000 * 2**20
"""Bytes of a "GB" in sources that divide nvidia-smi's MiB by 1000."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrameworkMemory:
    """Memory behaviour of one framework beyond the layout formulas."""

    constant_bytes: float = 0.0
    """Bytes of drivers, communication libraries and buffers of fixed size."""
    gaps: float = 0.0
    """Allocator fragmentation as a fraction of activations and working memory."""
    most_with_gaps: float = math.inf
    """Bytes of activations and working memory beyond which the gaps stop growing."""
    step_bytes: int = 0
    """Extra bytes per optimizer-owned parameter during the update."""
    low_gradient_bytes: int = 0
    """Bytes per parameter of compute-dtype gradients kept in addition to accumulated ones."""
    logit_bytes: int = 12
    """Bytes per logit during the loss; by default float32 log-probabilities and two gradients."""
    selective: Literal["scores", "odd matmuls"] = "scores"
    """What selective recomputation recomputes: attention scores, or all but every other matmul."""
    stays_gathered: bool = False
    """Whether a fully sharded pipeline stage is gathered once per step and stays gathered."""
    fused: bool = False
    """Whether norms and gates are fused kernels that keep only tensors their backward needs."""
    float8_inputs: bool = False
    """Whether matmul inputs are kept in float8."""
    whole_sequences: int = 0
    """Number of full-sequence tensors that sequence parallelism holds in a block."""


PLAIN = FrameworkMemory()
"""The formulas without framework-specific memory."""

_MEGATRON = FrameworkMemory(fused=True, logit_bytes=8)
"""The loss holds bf16 logits, their float32 softmax, later its gradient, and that in bf16."""
_DEEPSPEED = FrameworkMemory(constant_bytes=5.93e9, gaps=0.557, most_with_gaps=16e9, step_bytes=4)
"""Fitted to the 94 published peaks of BLOOM's layout search."""
_FRAMEWORKS: dict[str, dict[str, FrameworkMemory]] = {
    "bloom": {"": _DEEPSPEED, "bfloat16": dataclasses.replace(_DEEPSPEED, low_gradient_bytes=2)},
    "torchtitan": {
        "": FrameworkMemory(
            selective="odd matmuls", logit_bytes=14, stays_gathered=True, whole_sequences=8
        )
    },
    # Its loss is one fused kernel on 16-bit logits.
    "llm-foundry": {"": FrameworkMemory(logit_bytes=4)},
    **{
        family: {"": _MEGATRON, "float8": dataclasses.replace(_MEGATRON, float8_inputs=True)}
        for family in ("nemo", "megatron-core", "megatron-bridge", "megatron-2023")
    },
}


def find_framework_memory(family: str, dtype: str) -> FrameworkMemory:
    """Returns a framework's memory behaviour with matmuls in `dtype`; `PLAIN` if unknown."""
    variants = _FRAMEWORKS.get(family, {})
    return variants.get(dtype, variants.get("", PLAIN))


def usable_bytes(device: Device) -> float:
    """Returns the usable memory of a device. Vendors' GB of HBM are GiB; 1% is reserved."""
    return device.memory_bytes.value / GB * GIB * _USABLE
