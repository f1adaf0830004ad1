"""Peak memory of one device under any layout, for arrays of layouts.

N parameters are divided by tensor × pipeline. ZeRO (Rajbhandari et al. 2020) divides states further
by `shard`. Replicas of the shards, as in hybrid sharding, do not reduce memory:

    optimizer state   sharded from stage 1 on
    gradients         sharded from stage 2 on, if they are averaged after every micro-batch or
                      there is only one; otherwise they accumulate unsharded
    parameters        sharded from stage 3 on, with three units gathered in the compute dtype: two
                      blocks, and a block or the embedding, whichever is larger
    weight copies     autocast keeps matrices in the compute dtype in addition to float32 until the
                      end of the pass
    buckets           with sharded gradients, two units in flight

For activations see `paceline.predict.cost.activations`. The activation peak is the larger of two
stages. The first stage keeps the most activations, plus one block while it is recomputed. The last
stage has the fewest micro-batches in flight, plus the logits of one.

The largest stage of a pipeline has ceil(L / p) blocks and the embedding or the output layer. If
L + 2 blocks divide evenly and L do not, embedding and output layer count as one block each, as in
BLOOM and Llama 3. The largest stage then has (L + 2) / p blocks, or one less and the embedding. For
Paceline's trainer it is the largest of the trainer's stages (`paceline.accounting.counts`), which
balance the work. `paceline.predict.cost.framework_memory` adds framework-specific memory.

A mixture has E experts in most of its blocks. Each of x expert ranks holds E / x whole experts:
tensor ranks do not divide them, as in Megatron with one expert tensor rank. A ZeRO stage shards
them over the t c s / x ranks, of s shards, that hold the same experts:

    experts           m h f E / x weights per block with experts, over t c s / x ranks
    router            h E weights per block with experts, over the shards
    all others        as above, without either of them (`paceline.accounting.counts`)

The largest stage has experts in all of its blocks, if the model has that many blocks with experts.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from paceline.accounting.counts import (
    ParameterCount,
    count_parameters,
    expert_parameters,
    other_parameters,
    router_parameters,
)
from paceline.core.specs import Experts
from paceline.predict.cost.activations import (
    block_bytes_per_token,
    blocks_in_flight,
    kept_activations,
    logit_bytes,
    recomputed_bytes,
    trainer_loads,
    whole_sequence_bytes,
)
from paceline.predict.cost.layouts import SHARDING_STAGES, Layouts, Workload

_UNITS_REDUCED = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes of model states on one device, as arrays shaped like the layouts'."""

    parameters: Any
    weight_copies: Any
    gathered: Any
    """Units of a fully sharded model that are gathered while in use."""
    gradients: Any
    buckets: Any
    optimizer_state: Any

    @property
    def total(self) -> Any:
        """Sum of all states."""
        return sum(getattr(self, field.name) for field in dataclasses.fields(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutMemory:
    """Peak memory of one device in a step, by part."""

    states: StateBytes
    activations: Any
    """Activations that the first stage keeps for backward."""
    working: Any
    """Activation peak minus `activations`: a block being recomputed, or logits."""
    framework: Any = 0.0
    """Additional memory of the framework, the allocator and drivers."""

    @property
    def total(self) -> Any:
        """Sum of all parts."""
        return self.states.total + self.activations + self.working + self.framework


class _Part(NamedTuple):
    """A group of parameters with the same division over ranks."""

    stage: Any
    """Number in the largest pipeline stage, before any division."""
    block: Any
    """Number in one block that fully sharded ranks gather."""
    ranks: Any
    """Ranks that divide the parameters before any sharding."""
    shards: Any
    """Ranks over which a ZeRO stage shards the parameters."""


def layout_state_bytes(layouts: Layouts, workload: Workload) -> StateBytes:
    """Returns the states of one device."""
    counted = _counted(workload)
    parts = _parts(layouts, workload, counted)
    held = sum(part.stage / part.ranks for part in parts)
    shards = layouts.state_shards
    sharded = _shards_gradients(layouts) & ~accumulates_whole_gradients(layouts, workload)
    framework = workload.framework_memory

    def owned(size: int, divided: Any) -> Any:
        return sum(
            part.stage * size / (part.ranks * np.where(divided, part.shards, 1)) for part in parts
        )

    away = (layouts.stage >= SHARDING_STAGES["parameters"]) & (shards > 1)
    gathered, averaged_at_once = _units_in_flight(layouts, counted, parts)
    gathered = np.minimum(gathered, held)
    if framework.stays_gathered:
        gathered = np.where(layouts.pipeline > 1, held, gathered)
    averaged = layouts.shard * layouts.replicate * layouts.context > 1
    in_flight = np.where(sharded, np.minimum(averaged_at_once, held), 0.0)
    return StateBytes(
        parameters=owned(workload.parameter_bytes, layouts.stage >= 3),
        weight_copies=_weight_copies(layouts, workload, counted, parts, away),
        gathered=np.where(away, gathered, 0.0) * workload.compute_bytes,
        gradients=owned(workload.gradient_bytes + framework.low_gradient_bytes, sharded),
        buckets=np.where(averaged, in_flight, 0.0) * workload.reduction_bytes,
        optimizer_state=owned(workload.optimizer_bytes + framework.step_bytes, layouts.stage >= 1),
    )


def _shards_gradients(layouts: Layouts) -> Any:
    """Returns whether the ZeRO stage shards gradients once they are averaged."""
    return (layouts.stage >= SHARDING_STAGES["gradients"]) & (layouts.state_shards > 1)


def accumulates_whole_gradients(layouts: Layouts, workload: Workload) -> Any:
    """Returns whether gradients that a ZeRO stage shards are whole until the last micro-batch."""
    once = (np.asarray(workload.num_micro_batches) > 1) & (not workload.reduces_every_pass)
    return _shards_gradients(layouts) & once


def _parts(layouts: Layouts, workload: Workload, counted: ParameterCount) -> list[_Part]:
    """Returns the dense parameters, and for a mixture also the experts and the routers."""
    unit = (counted.attention + counted.feed_forward) / workload.shape.num_layers
    shards = layouts.state_shards
    dense = _Part(stage_parameters(layouts, workload), unit, layouts.tensor, shards)
    experts, shape = workload.experts, workload.shape
    if experts is None:
        return [dense]
    blocks = blocks_with_experts(layouts, workload, experts)
    routed = expert_parameters(experts, shape) * experts.num_experts
    router = router_parameters(experts, shape)
    # Experts are divided over the expert axis, routers over no axis.
    return [
        dense,
        _Part(routed * blocks, routed, np.asarray(layouts.expert), expert_shards(layouts)),
        _Part(router * blocks, router, 1, shards),
    ]


def _units_in_flight(
    layouts: Layouts, counted: ParameterCount, parts: list[_Part]
) -> tuple[Any, Any]:
    """Returns the parameters of the units gathered, and of those being averaged, per device."""
    tensor, (dense, *others) = layouts.tensor, parts
    if not others:
        largest = np.maximum(dense.block, counted.embedding)
        return (2 * dense.block + largest) / tensor, _UNITS_REDUCED * largest / tensor
    unit = sum(part.block / part.ranks for part in parts)
    largest = np.maximum(unit, counted.embedding / tensor)
    return 2 * unit + largest, _UNITS_REDUCED * largest


def _weight_copies(
    layouts: Layouts, workload: Workload, counted: ParameterCount, parts: list[_Part], away: Any
) -> Any:
    """Returns the bytes of compute-dtype copies of float32 matrices."""
    precision = workload.precision
    keeps_copies = precision.autocast and precision.compute != precision.parameters
    size = workload.compute_bytes
    matrices = np.where(away, 0.0, counted.matmul if keeps_copies else 0.0)
    copies = matrices * size / (parts[0].ranks * layouts.pipeline)
    for part in parts[1:] if keeps_copies else ():
        copies = copies + np.where(away, 0.0, part.stage) * size / part.ranks
    return copies


def _counted(workload: Workload) -> ParameterCount:
    """Counts the parameters that tensor ranks divide."""
    if workload.experts is None:
        return count_parameters(workload.shape)
    return other_parameters(workload.experts, workload.shape)


def stage_parameters(layouts: Layouts, workload: Workload) -> Any:
    """Returns the parameters of the largest stage over all tensor ranks, without experts."""
    if workload.trainer_stages:
        return trainer_loads(layouts, workload).parameters
    counted = _counted(workload)
    blocks, stages = workload.shape.num_layers, layouts.pipeline
    ends = np.maximum(counted.embedding + counted.positions, counted.head)
    block = (counted.total - counted.embedding - counted.positions - counted.head) / blocks
    with_ends = (blocks + 2) // stages
    balanced = np.maximum(with_ends * block, (with_ends - 1) * block + ends)
    plain = -(-blocks // stages) * block + ends
    is_balanced = _ends_are_blocks(layouts, workload)
    return np.where(stages == 1, counted.total, np.where(is_balanced, balanced, plain))


def _ends_are_blocks(layouts: Layouts, workload: Workload) -> Any:
    """Whether stages divide evenly only if embedding and output layer count as one block each."""
    blocks, stages = workload.shape.num_layers, layouts.pipeline
    return ((blocks + 2) % stages == 0) & (blocks % stages != 0)


def blocks_with_experts(layouts: Layouts, workload: Workload, experts: Experts) -> Any:
    """Returns the number of blocks with experts in the largest stage."""
    blocks, stages = workload.shape.num_layers, layouts.pipeline
    is_balanced = _ends_are_blocks(layouts, workload)
    most = np.where(is_balanced, (blocks + 2) // stages, -(-blocks // stages))
    return np.minimum(most, blocks - experts.num_dense_layers)


def expert_shards(layouts: Layouts) -> Any:
    """Returns the number of ranks that hold the same experts, over which ZeRO shards them."""
    return np.maximum(layouts.tensor * layouts.context * layouts.shard / layouts.expert, 1)


def layout_memory(layouts: Layouts, workload: Workload) -> LayoutMemory:
    """Returns the peak memory of one device, using the largest stage for each part."""
    first = kept_activations(layouts, workload)
    per_token = block_bytes_per_token(layouts, workload)
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
