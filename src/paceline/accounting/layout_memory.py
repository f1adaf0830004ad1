"""Memory of one device under any layout, for arrays of layouts at once.

States. N parameters are divided by tensor × pipeline, and what a sharding stage divides further by
`shard` (ZeRO, Rajbhandari et al. 2020): optimizer state from stage 1, gradients from 2, parameters
from 3, which then holds some layers gathered.

Activations of a block whose feed-forward is four times as wide, in 16 bits with dropout, for s b
tokens of width h and a heads, over t tensor-parallel devices (Korthikanti et al. 2022), in bytes:

    nothing split but matrices   s b h (10 + 24 / t + 5 a s / (h t))
    norms and residuals as well  (s b h / t) (34 + 5 a s / h)
    selective recomputation      the same without the terms with a, which are attention's scores
    full recomputation           2 s b h, the block's input

A pipeline of p stages has up to p micro-batches under way, so that the first stage holds as many
blocks' activations as the whole model has; interleaving v parts per stage adds (p - 1) / (p v) of
them (Narayanan et al. 2021).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.accounting.collectives import Numbers
from paceline.core.plan import ParallelLayout

Integers = npt.NDArray[np.int64]

_STAGES = {"none": 0, "optimizer": 1, "gradients": 2, "parameters": 3}
_CHECKPOINTING = {"none": 0, "selective": 1, "full": 2}
_LAYERS_GATHERED = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layouts:
    """Many layouts, one array per field; any field may also be one number for all."""

    replicate: Integers
    shard: Integers
    tensor: Integers
    pipeline: Integers
    pipeline_interleave: Integers
    stage: Integers
    """ZeRO's stage: 0 shards nothing, 3 everything."""
    sequence_parallel: npt.NDArray[np.bool_]
    checkpointing: Integers
    """0 none, 1 selective, 2 full."""

    @classmethod
    def of(cls, layouts: Sequence[ParallelLayout]) -> "Layouts":
        """Turns layouts into arrays."""

        def numbers(field: str) -> Integers:
            return np.array([getattr(layout, field) for layout in layouts], dtype=np.int64)

        return cls(
            replicate=numbers("replicate"),
            shard=numbers("shard"),
            tensor=numbers("tensor"),
            pipeline=numbers("pipeline"),
            pipeline_interleave=numbers("pipeline_interleave"),
            stage=np.array([_STAGES[layout.sharding] for layout in layouts]),
            sequence_parallel=np.array([layout.sequence_parallel for layout in layouts]),
            checkpointing=np.array(
                [_CHECKPOINTING[layout.activation_checkpointing] for layout in layouts]
            ),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateBytes:
    """What outlives a step on one device, by what it is; arrays like the layouts'."""

    parameters: Any
    gradients: Any
    optimizer_state: Any
    gathered: Any
    """Layers that a fully sharded model holds in whole while it needs them."""

    @property
    def total(self) -> Any:
        """All together."""
        return self.parameters + self.gradients + self.optimizer_state + self.gathered


def layout_state_bytes(
    layouts: Layouts,
    *,
    num_parameters: int,
    parameters_per_layer: int,
    parameter_bytes: float,
    gradient_bytes: float,
    optimizer_bytes: float,
) -> StateBytes:
    """Returns the states of one device, the bytes of each given per parameter."""
    held = num_parameters / (layouts.tensor * layouts.pipeline)

    def share(from_stage: int) -> Any:
        return held / np.where(layouts.stage >= from_stage, layouts.shard, 1)

    gathered = np.where(
        (layouts.stage >= _STAGES["parameters"]) & (layouts.shard > 1),
        _LAYERS_GATHERED * parameters_per_layer * parameter_bytes / layouts.tensor,
        0.0,
    )
    return StateBytes(
        parameters=share(3) * parameter_bytes,
        gradients=share(2) * gradient_bytes,
        optimizer_state=share(1) * optimizer_bytes,
        gathered=gathered,
    )


def layout_activation_bytes(
    layouts: Layouts,
    *,
    d_model: int,
    num_heads: int,
    num_layers: int,
    context_length: int,
    micro_batch: Numbers,
) -> Any:
    """Returns what the first stage keeps for backward, in the formulas of the module."""
    whole = context_length * np.asarray(micro_batch, dtype=np.float64) * d_model
    scores = 5 * num_heads * context_length / d_model / layouts.tensor
    linear = np.where(layouts.sequence_parallel, 34 / layouts.tensor, 10 + 24 / layouts.tensor)
    per_block = whole * np.select(
        [layouts.checkpointing == 0, layouts.checkpointing == 1], [linear + scores, linear], 2.0
    )
    stages = layouts.pipeline
    under_way = 1 + np.where(
        layouts.pipeline_interleave > 1, (stages - 1) / (stages * layouts.pipeline_interleave), 0.0
    )
    return per_block * num_layers * under_way


def pipeline_bubble(
    num_stages: Numbers, num_micro_batches: Numbers, interleave: Numbers = 1
) -> Any:
    """Returns the idle time of a pipeline over its busy time, (p - 1) / (v m)."""
    stages = np.asarray(num_stages, dtype=np.float64)
    return (stages - 1) / (np.asarray(interleave) * np.asarray(num_micro_batches))
