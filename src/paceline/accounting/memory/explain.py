"""Explains the memory of a training step under a strategy, and the number of ranks it needs."""

import dataclasses

from paceline.accounting.explanation import Explanation, WorkedLine
from paceline.accounting.memory.activations import Checkpointing, count_activations
from paceline.accounting.memory.step import MemoryParts, step_memory
from paceline.core.finding import Finding
from paceline.core.hardware import Device
from paceline.core.specs import AttentionImplementation, BatchShape, ModelShape, Precision
from paceline.core.strategies import (
    DEFAULT_BUCKET_SIZE_MB,
    SHARDED_PARAMETERS,
    SHARDED_STATE,
    StrategyName,
)
from paceline.core.units import (
    format_binary_bytes,
    format_gibibytes,
    format_gigabytes,
    to_gibibytes,
    to_gigabytes,
)

_MOST_RANKS = 2**14
"""Limit of the search: memory that does not fit on this many ranks is not sharded across them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlan:
    """A training step whose memory is explained."""

    shape: ModelShape
    batch: BatchShape
    strategy: StrategyName
    checkpointing: Checkpointing = "none"
    attention: AttentionImplementation = "sdpa"
    precision: Precision = dataclasses.field(default_factory=Precision)
    bucket_size_mb: float = DEFAULT_BUCKET_SIZE_MB
    """Bucket size in MiB, for strategies that have buckets."""

    def instants(self, world_size: int) -> dict[str, MemoryParts]:
        """Returns the memory of the fullest rank at each instant of the step."""
        return step_memory(
            self.shape,
            self.batch,
            self.precision,
            self.strategy,
            world_size,
            activation_checkpointing=self.checkpointing,
            attention=self.attention,
            bucket_size_mb=self.bucket_size_mb,
        )

    def peak_bytes(self, world_size: int) -> int:
        """Returns the peak memory of the fullest rank in the step."""
        return max(parts.total for parts in self.instants(world_size).values())

    def fewest_ranks(self, memory_bytes: float) -> int | None:
        """Returns the smallest number of ranks on which the step fits; None if none is enough."""
        if self.peak_bytes(1) <= memory_bytes:
            return 1
        if self.strategy not in SHARDED_STATE:
            return None
        too_few, enough = 1, 2
        while self.peak_bytes(enough) > memory_bytes:
            too_few, enough = enough, 2 * enough
            if enough > _MOST_RANKS:
                return None
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            fits = self.peak_bytes(middle) <= memory_bytes
            too_few, enough = (too_few, middle) if fits else (middle, enough)
        return enough


def fit_on_device(plan: StepPlan, world_size: int, device: Device) -> Finding:
    """Returns whether the fullest rank fits into a device's memory, with a remedy if not."""
    peak, capacity = plan.peak_bytes(world_size), device.memory_bytes.value
    fewest = plan.fewest_ranks(capacity)
    figures = {"peak_bytes": float(peak), "device_memory_bytes": capacity}
    if fewest is not None:
        figures["fewest_ranks"] = fewest
    capacity_text = format_gibibytes(to_gibibytes(capacity), 1)
    message = f"{to_gibibytes(peak):.1f} of {capacity_text} ({device.description})"
    if peak <= capacity:
        return Finding(name="fits", message=message, figures=figures)
    remedy = f"it fits from {fewest} ranks on"
    if fewest is None:
        remedy = "no number of ranks is enough; try a smaller batch or activation checkpointing"
        if plan.strategy not in SHARDED_PARAMETERS:
            remedy += ", or shard more (fully_sharded is ZeRO-3)"
    return Finding(name="does_not_fit", message=message, remedy=remedy, figures=figures)


def explain_memory(plan: StepPlan, world_size: int, *, device: Device | None = None) -> Explanation:
    """Explains the memory of the fullest rank at each instant of a step."""
    steps = []
    values: dict[str, float] = {}

    def add(formula: str, numbers: str, result: str) -> None:
        steps.append(WorkedLine(formula=formula, numbers=numbers, result=result))

    for instant, parts in plan.instants(world_size).items():
        held = dataclasses.asdict(parts)
        values |= {f"{instant}_{name}_bytes": size for name, size in held.items()}
        values[f"{instant}_bytes"] = parts.total
        add(
            f"{instant} = {' + '.join(held)}".replace("_", " "),
            " + ".join(map(format_binary_bytes, held.values())),
            format_binary_bytes(parts.total),
        )
    saved = count_activations(
        plan.shape, plan.batch, plan.checkpointing, plan.precision, plan.attention
    ).saved
    values["saved_activation_bytes"] = saved.activations
    values["saved_weight_copy_bytes"] = saved.weight_copies
    add(
        "kept for backward = activations + copies of weights",
        " + ".join(map(format_binary_bytes, dataclasses.astuple(saved))),
        format_binary_bytes(saved.total),
    )
    if device is not None:
        fitting = fit_on_device(plan, world_size, device)
        values |= fitting.figures
        num_ranks = fitting.figures.get("fewest_ranks")
        capacity = format_gigabytes(to_gigabytes(device.memory_bytes.value))
        add(
            "ranks = the fewest whose peak fits",
            f"{device.description}, {capacity}",
            "no number of ranks is enough" if num_ranks is None else f"{num_ranks:.0f}",
        )
    precision: str = plan.precision.parameters
    if plan.precision.autocast:
        precision += f" weights, autocast to {plan.precision.compute}"
    scores = "all" if plan.attention == "naive" else "no"
    return Explanation(
        question=f"Memory of a step under {plan.strategy}, the fullest of {world_size} ranks",
        assumptions=(
            f"{plan.batch.num_sequences} sequences of {plan.batch.context_length} tokens per rank",
            f"{precision}, AdamW, eager, communication that keeps up",
            f"attention {plan.attention}, which stores {scores} scores",
            f"activation checkpointing: {plan.checkpointing}",
            "neither the allocator's fragmentation nor buffers of kernels, driver and NCCL",
        ),
        steps=tuple(steps),
        values=values,
    )
