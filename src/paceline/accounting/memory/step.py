"""Memory of a device at the three instants of a training step, and its explanation.

In addition to the model states (`paceline.accounting.memory.model_states`):

    buffers       the tables of rotary positions, and tokens and targets of the batch. A container's
                  buckets exist from the start; until the first backward there are no gradients, and
                  the buckets count as buffers
    activations   the rest of the peak: what autograd holds (see
                  `paceline.accounting.memory.activations`), and messages, gathered parameters and
                  gradients that exist beside it (`paceline.accounting.memory.strategy_buffers`).
                  Fused AdamW needs nothing more

With several micro-batches, the peak is the largest of all passes. Slow communication takes no more
memory: the program frees a message only when the next one has been sent.
"""

import dataclasses

from paceline.accounting.counts import count_parameters
from paceline.accounting.explanation import Explanation, WorkedLine
from paceline.accounting.memory.activations import (
    Checkpointing,
    SavedForBackward,
    count_activations,
)
from paceline.accounting.memory.model_states import model_state_bytes
from paceline.accounting.memory.passes import has_lasting_gradients, peak_of_passes
from paceline.core.finding import Finding
from paceline.core.hardware import Device
from paceline.core.specs import (
    AttentionImplementation,
    BatchShape,
    ModelShape,
    Phase,
    Precision,
    bytes_per_element,
)
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

_TABLE_BYTES = 4
_TOKEN_BYTES = 8
_ADAM_MOMENTS = 2
_FLOAT32_BYTES = 4

INSTANTS = ("after_init", "before_step", "after_step")
"""After model, container and optimizer are built; the peaks before and in the optimizer step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryParts:
    """Bytes of a device at one instant: `parameters`, `gradients`, `optimizer_state` and others."""

    parameters: int
    gradients: int
    optimizer_state: int
    buffers: int
    """Other memory that outlives a step: the model's tables, the batch, a container's buffers."""
    activations: int
    """The rest of the peak."""

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(dataclasses.astuple(self))


def step_memory(
    shape: ModelShape,
    batch: BatchShape,
    precision: Precision,
    strategy: StrategyName,
    world_size: int,
    *,
    activation_checkpointing: Checkpointing = "none",
    attention: AttentionImplementation = "sdpa",
    bucket_size_mb: float = DEFAULT_BUCKET_SIZE_MB,
    on_accelerator: bool = False,
) -> dict[str, MemoryParts]:
    """Predicts the memory of a step at its three instants, on the fullest rank.

    Args:
        shape: The model's dimensions.
        batch: The batch of one rank.
        precision: dtypes of parameters, activations and optimizer state.
        strategy: Data-parallel strategy, which determines the states that each rank holds.
        world_size: Number of ranks.
        activation_checkpointing: full if blocks are recomputed in backward.
        attention: Fused (sdpa, tiled), or storing its scores (naive).
        bucket_size_mb: Bucket size in MiB; matters if buckets are reduce-scattered and freed.
        on_accelerator: Whether kernels and collectives are those of an accelerator, not of a CPU.
    """
    states = model_state_bytes(
        shape, precision, strategy, world_size, bucket_size_mb=bucket_size_mb
    )
    tables = shape.max_context_length * shape.head_width * _TABLE_BYTES
    tokens = 2 * batch.tokens_per_pass * batch.accumulation_steps * _TOKEN_BYTES
    peak = peak_of_passes(
        shape,
        batch,
        activation_checkpointing,
        precision,
        attention,
        strategy,
        world_size,
        bucket_size_mb,
        on_accelerator,
    )
    if not has_lasting_gradients(strategy, world_size):
        # Gradients are among what the passes allocate.
        peak = max(peak - states.gradients, 0)
    before = MemoryParts(**dataclasses.asdict(states), buffers=tables + tokens, activations=peak)
    has_buckets = world_size > 1 and strategy not in ("none", *SHARDED_PARAMETERS)
    return {
        "after_init": dataclasses.replace(
            before,
            gradients=0,
            optimizer_state=0,
            buffers=before.buffers + (states.gradients if has_buckets else 0),
            activations=0,
        ),
        "before_step": before,
        "after_step": dataclasses.replace(before, activations=0),
    }


def minimum_step_bytes(
    shape: ModelShape, batch: BatchShape, precision: Precision, phase: Phase
) -> int:
    """Returns the bytes of weights, Adam's moments, and the larger of logits and gradients.

    This is a lower bound, used to skip cases that cannot run: it leaves out everything that an
    implementation might avoid. From the second step on, weights and moments always exist. Logits
    and gradients need not coexist: logits are freed before the last gradients appear, and the
    gradients of the previous step before the logits appear.

    Args:
        shape: The model's dimensions.
        batch: Sequences per pass, and their length.
        precision: dtypes of weights, gradients, optimizer state and compute.
        phase: forward, forward-backward or train: which parts of a step run.
    """
    num_parameters = count_parameters(shape).total
    resident = bytes_per_element(precision.parameters)
    if phase == "train":
        resident += _ADAM_MOMENTS * bytes_per_element(precision.optimizer_state)
        resident += _FLOAT32_BYTES if precision.master_weights else 0
    gradients = 0 if phase == "forward" else bytes_per_element(precision.gradients)
    logits = batch.tokens_per_pass * shape.vocab_size * bytes_per_element(precision.compute)
    return num_parameters * resident + max(num_parameters * gradients, logits)


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
    on_accelerator: bool = False
    """Whether kernels and collectives are those of an accelerator, not of a CPU."""

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
            on_accelerator=self.on_accelerator,
        )

    @property
    def kept_for_backward(self) -> SavedForBackward:
        """Returns what autograd has saved after forward."""
        return count_activations(
            self.shape,
            self.batch,
            self.checkpointing,
            self.precision,
            self.attention,
            on_accelerator=self.on_accelerator,
        ).saved

    @property
    def method(self) -> str:
        """How the memory is found, as an assumption of the explanation."""
        return "every tensor of the eager model, counted operation by operation"

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
            remedy += ", or shard more (fsdp is ZeRO-3)"
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
    saved = plan.kept_for_backward
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
            plan.method,
            f"{precision}, AdamW, communication that keeps up",
            f"attention {plan.attention}, which stores {scores} scores",
            f"activation checkpointing: {plan.checkpointing}",
            "neither the allocator's fragmentation nor buffers of kernels, driver and NCCL",
        ),
        steps=tuple(steps),
        values=values,
    )
