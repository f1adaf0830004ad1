"""Memory of one device under any layout, for arrays of layouts at once.

N parameters are divided by tensor × pipeline, and what a sharding stage divides further by `shard`
(ZeRO, Rajbhandari et al. 2020); replicas of the shards, as in hybrid sharding, divide nothing:

    optimizer state   from stage 1 on
    gradients         from stage 2 on, if they are averaged after every micro-batch or there is one
                      only; otherwise they accumulate in whole
    parameters        from stage 3 on, which then holds three units gathered in the compute dtype:
                      two blocks, and a block or the embedding, whichever is larger
    weight copies     autocast keeps matrices in the compute dtype beside those in float32, until
                      the pass is over
    buckets           a second copy of gradients, where buckets are not where gradients lie; where
                      gradients are sharded, two units that are being averaged

Activations are those of `paceline.planner.cost.activations`. The peak is not their sum with
everything else: the first stage keeps most, and holds one block more while it recomputes it; the
last has the fewest micro-batches in flight, and the logits of one. The larger of both counts.

The fullest stage of a pipeline has ceil(L / p) blocks and the embedding, or the output layer. Where
L + 2 blocks divide evenly and L do not, both count as blocks, as in BLOOM and Llama 3: it has
(L + 2) / p blocks, or one less and the embedding. What frameworks hold beyond all this is that of
`paceline.planner.cost.framework_memory`; without one, nothing.
"""

import dataclasses
from typing import Any

import numpy as np

from paceline.accounting.explanation import Quantity
from paceline.accounting.parameters import count_parameters
from paceline.planner.cost.activations import (
    block_bytes_per_token,
    blocks_in_flight,
    kept_activations,
    logit_bytes,
    recomputed_bytes,
    whole_sequence_bytes,
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
    framework: Any = 0.0
    """What the framework, the allocator and drivers hold beside all that."""

    @property
    def total(self) -> Any:
        """All together."""
        return self.states.total + self.activations + self.working + self.framework


def state_quantities(layouts: Layouts, workload: Workload) -> dict[str, Quantity]:
    """Returns the states of one device with their formulas, by field of `StateBytes`."""
    counted = count_parameters(workload.shape)
    stage = stage_parameters(layouts, workload)
    held = stage / layouts.tensor
    unit = (counted.attention + counted.feed_forward) / workload.shape.num_layers
    largest = np.maximum(unit, counted.embedding)
    at_once = workload.reduces_every_pass | (np.asarray(workload.num_micro_batches) == 1)
    shards = layouts.state_shards
    sharded = (layouts.stage >= SHARDING_STAGES["gradients"]) & (shards > 1) & at_once
    tensor = Quantity(layouts.tensor, "tensor")
    name = "N" if np.all(layouts.pipeline == 1) else "N of the fullest stage"
    framework = workload.framework_memory

    def owned(size: int, divided: Any) -> Quantity:
        parts = Quantity(np.where(divided, shards, 1), "shards")
        return Quantity(stage, name) * Quantity(size, "bytes") / (tensor * parts)

    away = (layouts.stage >= SHARDING_STAGES["parameters"]) & (shards > 1)
    gathered = np.minimum((2 * unit + largest) / layouts.tensor, held)
    if framework.stays_gathered:
        gathered = np.where(layouts.pipeline > 1, held, gathered)
    precision = workload.precision
    keeps_copies = precision.autocast and precision.compute != precision.parameters
    copies = np.where(away, 0.0, counted.matmul if keeps_copies else 0.0)
    averaged = layouts.shard * layouts.replicate * layouts.context > 1
    in_flight = np.where(
        sharded,
        np.minimum(_UNITS_REDUCED * largest / layouts.tensor, held),
        held if workload.bucket_copies else 0.0,
    )
    compute_bytes = Quantity(workload.compute_bytes, "bytes")
    return {
        "parameters": owned(workload.parameter_bytes, layouts.stage >= 3),
        "weight_copies": Quantity(copies, "matrices")
        * compute_bytes
        / (tensor * Quantity(layouts.pipeline, "pipeline")),
        "gathered": Quantity(
            np.where(away, gathered, 0.0),
            "(2 blocks + the larger of block and embedding, at most all) / tensor",
        )
        * compute_bytes,
        "gradients": owned(workload.gradient_bytes + framework.low_gradient_bytes, sharded),
        "buckets": Quantity(np.where(averaged, in_flight, 0.0), "gradients while they are averaged")
        * Quantity(workload.reduction_bytes, "bytes"),
        "optimizer_state": owned(
            workload.optimizer_bytes + framework.step_bytes, layouts.stage >= 1
        ),
    }


def stage_parameters(layouts: Layouts, workload: Workload) -> Any:
    """Returns the parameters of the fullest pipeline stage, all tensor ranks together."""
    counted = count_parameters(workload.shape)
    blocks, stages = workload.shape.num_layers, layouts.pipeline
    ends = np.maximum(counted.embedding + counted.positions, counted.head)
    block = (counted.total - counted.embedding - counted.positions - counted.head) / blocks
    with_ends = (blocks + 2) // stages
    balanced = np.maximum(with_ends * block, (with_ends - 1) * block + ends)
    is_balanced = ((blocks + 2) % stages == 0) & (blocks % stages != 0)
    plain = -(-blocks // stages) * block + ends
    return np.where(stages == 1, counted.total, np.where(is_balanced, balanced, plain))


def layout_state_bytes(layouts: Layouts, workload: Workload) -> StateBytes:
    """Returns the states of one device."""
    quantities = state_quantities(layouts, workload)
    return StateBytes(**{name: quantity.value for name, quantity in quantities.items()})


def layout_memory(layouts: Layouts, workload: Workload) -> LayoutMemory:
    """Returns what one device holds at the peak, on the stage that holds most."""
    first = kept_activations(layouts, workload).value
    per_token = block_bytes_per_token(layouts, workload).value
    tokens = workload.tokens / layouts.context
    last = per_token * tokens * blocks_in_flight(layouts, workload)[1]
    peak = np.maximum(
        first + recomputed_bytes(layouts, workload), last + logit_bytes(layouts, workload)
    )
    framework = workload.framework_memory
    beside = whole_sequence_bytes(layouts, workload)
    return LayoutMemory(
        states=layout_state_bytes(layouts, workload),
        activations=first,
        working=peak - first,
        framework=framework.constant_bytes
        + framework.gaps * np.minimum(peak, framework.most_with_gaps)
        + beside,
    )
