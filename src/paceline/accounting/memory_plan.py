"""The memory of a training step under a strategy, explained, and how many devices it takes."""

import dataclasses

from paceline.accounting.activations import Checkpointing
from paceline.accounting.explanation import Explanation, Step
from paceline.accounting.model_states import MemoryParts, step_memory
from paceline.core.hardware import Device
from paceline.core.specs import BatchShape, ModelShape, precision_preset
from paceline.core.strategies import SHARDED_STATE, StrategyName
from paceline.core.units import GB, format_binary_bytes

_PRECISION = "float32"
_MOST_RANKS = 2**14
"""Beyond this the search gives up: what does not fit on so many ranks is not divided by them."""


def peak_bytes(
    shape: ModelShape,
    batch: BatchShape,
    strategy: StrategyName,
    world_size: int,
    checkpointing: Checkpointing = "none",
) -> int:
    """Returns the most that the fullest rank holds in a step."""
    instants = _instants(shape, batch, strategy, world_size, checkpointing)
    return max(parts.total for parts in instants.values())


def fewest_ranks(
    shape: ModelShape,
    batch: BatchShape,
    strategy: StrategyName,
    memory_bytes: float,
    checkpointing: Checkpointing = "none",
) -> int | None:
    """Returns the smallest number of ranks on which a step fits; None where no number is enough."""

    def fits(ranks: int) -> bool:
        return peak_bytes(shape, batch, strategy, ranks, checkpointing) <= memory_bytes

    if fits(1):
        return 1
    if strategy not in SHARDED_STATE:
        return None
    too_few, enough = 1, 2
    while not fits(enough):
        too_few, enough = enough, 2 * enough
        if enough > _MOST_RANKS:
            return None
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if fits(middle) else (middle, enough)
    return enough


def explain_memory(
    shape: ModelShape,
    batch: BatchShape,
    strategy: StrategyName,
    world_size: int,
    *,
    checkpointing: Checkpointing = "none",
    device: Device | None = None,
) -> Explanation:
    """Explains what the fullest rank holds at each instant of a step."""
    steps = []
    values: dict[str, float] = {}
    for instant, parts in _instants(shape, batch, strategy, world_size, checkpointing).items():
        held = dataclasses.asdict(parts)
        values |= {f"{instant}_{name}_bytes": size for name, size in held.items()}
        values[f"{instant}_bytes"] = parts.total
        steps.append(
            Step(
                formula=f"{instant.replace('_', ' ')} = "
                + " + ".join(name.replace("_", " ") for name in held),
                numbers=" + ".join(format_binary_bytes(size) for size in held.values()),
                result=format_binary_bytes(parts.total),
            )
        )
    if device is not None:
        capacity = device.memory_bytes.value
        needed = fewest_ranks(shape, batch, strategy, capacity, checkpointing)
        steps.append(
            Step(
                formula="ranks = the fewest whose peak fits",
                numbers=f"{device.description}, {capacity / GB:.0f} GB",
                result="no number of ranks is enough" if needed is None else str(needed),
            )
        )
        if needed is not None:
            values["fewest_ranks"] = needed
    return Explanation(
        question=f"Memory of a step under {strategy}, the fullest of {world_size} ranks",
        assumptions=(
            f"{batch.num_sequences} sequences of {batch.context_length} tokens per rank",
            "float32, AdamW, eager, attention that stores no scores, communication that keeps up",
            f"activation checkpointing: {checkpointing}",
            "neither the allocator's gaps nor what a driver keeps for itself",
        ),
        steps=tuple(steps),
        values=values,
    )


def _instants(
    shape: ModelShape,
    batch: BatchShape,
    strategy: StrategyName,
    world_size: int,
    checkpointing: Checkpointing,
) -> dict[str, MemoryParts]:
    return step_memory(
        shape,
        batch,
        precision_preset(_PRECISION),
        strategy,
        world_size,
        activation_checkpointing=checkpointing,
    )
