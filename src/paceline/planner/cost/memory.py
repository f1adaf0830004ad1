"""Memory of one device under any layout, for arrays of layouts at once.

N parameters are divided by tensor × pipeline, and what a sharding stage divides further by `shard`
(ZeRO, Rajbhandari et al. 2020); replicas of the shards, as in hybrid sharding, divide nothing:

    optimizer state   from stage 1 on
    gradients         from stage 2 on, if they are averaged after every micro-batch or there is one
                      only; otherwise they accumulate in whole
    parameters        from stage 3 on, which then holds three units gathered in the compute format:
                      two blocks, and a block or the embedding, whichever is larger
    weight copies     autocast keeps matrices in the compute format beside those in float32, until
                      the pass is over
    buckets           a second copy of gradients, where buckets are not where gradients lie; where
                      gradients are divided, two units that are being averaged

Activations are those of `layout_activations`. The peak is not their sum with everything else: the
first stage keeps most, and holds one block more while it recomputes it; the last has the fewest
micro-batches under way, and the logits of one. The larger of both counts. Parameters are taken to
be spread evenly over the stages, embedding included. What an allocator loses in gaps and what
drivers and communication libraries keep for themselves is not part of it.
"""

import dataclasses
from typing import Any

import numpy as np

from paceline.accounting.parameters import count_parameters
from paceline.planner.cost.activations import (
    block_bytes_per_token,
    last_stage_blocks,
    layout_activation_bytes,
    logit_bytes,
    recomputed_bytes,
)
from paceline.planner.cost.layouts import SHARDING_STAGES, Layouts, Workload

_UNITS_REDUCED = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateBytes:
    """What one device holds of the model, by what it is; arrays like the layouts'."""

    parameters: Any
    weight_copies: Any
    gathered: Any
    """Units that a fully sharded model holds in whole while it needs them."""
    gradients: Any
    buckets: Any
    optimizer_state: Any

    @property
    def total(self) -> Any:
        """All together."""
        return sum(getattr(self, field.name) for field in dataclasses.fields(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutMemory:
    """What one device holds at the peak of a step."""

    states: StateBytes
    activations: Any
    """What the first stage keeps for backward."""
    working: Any
    """What the peak holds beyond that: a block that is computed again, or logits."""

    @property
    def total(self) -> Any:
        """All together."""
        return self.states.total + self.activations + self.working


def layout_state_bytes(layouts: Layouts, workload: Workload) -> StateBytes:
    """Returns the states of one device."""
    counted = count_parameters(workload.shape)
    held = counted.total / layouts.model_devices
    unit = (counted.attention + counted.feed_forward) / workload.shape.num_layers
    largest = max(unit, counted.embedding)
    whole_gradients = ~_gradients_are_divided(layouts, workload)

    def share(divided: Any) -> Any:
        return held / np.where(divided, layouts.shard, 1)

    away = (layouts.stage >= SHARDING_STAGES["parameters"]) & (layouts.shard > 1)
    gathered = np.minimum((2 * unit + largest) / layouts.tensor, held)
    copies = counted.matmul / layouts.model_devices if _keeps_copies(workload) else 0.0
    averaged = layouts.shard * layouts.replicate * layouts.context > 1
    in_flight = np.where(
        whole_gradients,
        held if workload.bucket_copies else 0.0,
        np.minimum(_UNITS_REDUCED * largest / layouts.tensor, held),
    )
    return StateBytes(
        parameters=share(layouts.stage >= 3) * workload.parameter_bytes,
        weight_copies=np.where(away, 0.0, copies) * workload.compute_bytes,
        gathered=np.where(away, gathered, 0.0) * workload.compute_bytes,
        gradients=share(~whole_gradients) * workload.gradient_bytes,
        buckets=np.where(averaged, in_flight, 0.0) * workload.reduction_bytes,
        optimizer_state=share(layouts.stage >= 1) * workload.optimizer_bytes,
    )


def layout_memory(layouts: Layouts, workload: Workload) -> LayoutMemory:
    """Returns what one device holds at the peak, on the stage that holds most."""
    first = layout_activation_bytes(layouts, workload)
    tokens = workload.tokens / layouts.context
    last = block_bytes_per_token(layouts, workload) * tokens * last_stage_blocks(layouts, workload)
    peak = np.maximum(
        first + recomputed_bytes(layouts, workload), last + logit_bytes(layouts, workload)
    )
    return LayoutMemory(
        states=layout_state_bytes(layouts, workload), activations=first, working=peak - first
    )


def _gradients_are_divided(layouts: Layouts, workload: Workload) -> Any:
    at_once = workload.reduces_every_pass | (np.asarray(workload.num_micro_batches) == 1)
    return (layouts.stage >= SHARDING_STAGES["gradients"]) & (layouts.shard > 1) & at_once


def _keeps_copies(workload: Workload) -> bool:
    precision = workload.precision
    return precision.autocast and precision.compute != precision.parameters
