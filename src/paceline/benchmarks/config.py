"""What each benchmark measures. Free of torch, because the command line imports it.

A sweep has the options of one verb. Its cases are the combinations of the options that take several
values; a case holds one value of each, and the sweep for the options that all cases share.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Literal, NamedTuple

from paceline.benchmarks.options import (
    Compilation,
    LayoutSpec,
    ModelName,
    PrecisionName,
    RankSweep,
    RunLimits,
    ShapeOverrides,
    StrategyChoice,
    parse_layout,
    require_counts,
)
from paceline.core.errors import UsageError
from paceline.core.hardware import DeviceName
from paceline.core.runnable import Work, require_runnable
from paceline.core.specs import (
    AttentionImplementation,
    AttentionKind,
    BatchShape,
    ModelShape,
    Phase,
)
from paceline.core.strategies import (
    BUCKET_STRATEGIES,
    COMPRESSIONS,
    DEFAULT_BUCKET_SIZE_MB,
    BucketSize,
    Compression,
    Operation,
    StrategyName,
    require_compression,
    require_unscaled,
)
from paceline.core.units import parse_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSweep:
    """Time attention forward and backward, and measure the memory it saves for backward."""

    implementation: tuple[AttentionKind, ...] = ("naive",)
    """Implementations to measure, one after the other."""
    head_dim: tuple[int, ...] = (16, 32, 64, 128)
    """Head dimensions; there is one head."""
    context: tuple[int, ...] = (256, 1024, 4096, 8192, 16384)
    """Context lengths, in tokens."""
    batch: int = 8
    """Sequences per batch."""
    dtype: tuple[PrecisionName, ...] = ("float32",)
    """dtypes of queries, keys and values."""
    causal: bool = False
    """Use a causal mask."""
    compile: bool = False
    """Compile the operation with torch.compile."""
    warmup: int = 5
    """Warm-up: forward and backward passes before measuring."""
    steps: int = 100
    """Forward and backward passes to measure; on CUDA, approximate."""
    device: DeviceName = "auto"
    """Device to run on."""
    limits: RunLimits = dataclasses.field(default_factory=lambda: RunLimits(time_limit_s=30.0))

    def __post_init__(self) -> None:
        require_counts(warmup=(self.warmup,), steps=self.steps)
        if min(self.head_dim, default=1) < 1:
            raise UsageError("--head-dim must be at least 1")

    def cases(self) -> "Iterator[AttentionCase]":
        """Yields every combination; the implementations to compare are adjacent."""
        for dtype, head_dim, context, implementation in itertools.product(
            self.dtype, self.head_dim, self.context, self.implementation
        ):
            batch = BatchShape(num_sequences=self.batch, context_length=context)
            yield AttentionCase(self, implementation, batch, head_dim, dtype)


class AttentionCase(NamedTuple):
    """One attention operation to measure, of a single head."""

    sweep: AttentionSweep
    implementation: AttentionKind
    batch: BatchShape
    head_dim: int
    dtype: PrecisionName


Architecture = Literal["sm80", "sm86", "sm90", "sm100", "gfx942"]
Mask = Literal["causal", "full"]
Lengths = Literal["even", "ragged"]

_LARGEST_HEAD_DIM = 256


class KernelCase(NamedTuple):
    """One configuration, for which all attention kernels are compiled."""

    architecture: Architecture
    dtype: PrecisionName
    head_dim: int
    mask: Mask
    lengths: Lengths
    group: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelSweep:
    """Compile the attention kernels ahead of time, without a GPU, and show their resource use."""

    architecture: tuple[Architecture, ...] = ("sm80", "sm86", "sm90", "sm100", "gfx942")
    """GPUs to compile for: A100, RTX 3090, H100, B200, MI300X."""
    dtype: tuple[PrecisionName, ...] = ("bfloat16",)
    """dtypes of queries, keys and values."""
    head_dim: tuple[int, ...] = (64, 128)
    """Head dimensions."""
    mask: tuple[Mask, ...] = ("causal", "full")
    """Attention masks: causal, or full for no mask."""
    lengths: tuple[Lengths, ...] = ("even", "ragged")
    """Sequence lengths: even lengths are multiples of the tile and need no mask at the end."""
    group: tuple[int, ...] = (1, 4)
    """Query heads per key-value head; more than one compiles to a loop over them."""

    def __post_init__(self) -> None:
        if not all(1 <= head_dim <= _LARGEST_HEAD_DIM for head_dim in self.head_dim):
            raise UsageError(f"--head-dim must be from 1 to {_LARGEST_HEAD_DIM}")
        if min(self.group, default=1) < 1:
            raise UsageError("--group must be at least 1")

    def cases(self) -> Iterator[KernelCase]:
        """Yields every combination, architectures in the outer loop."""
        combinations = itertools.product(
            self.architecture, self.dtype, self.head_dim, self.mask, self.lengths, self.group
        )
        return itertools.starmap(KernelCase, combinations)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveSweep:
    """Time collectives by size and number of ranks, and fit their latency and bandwidth."""

    operations: tuple[Operation, ...] = ("all_reduce",)
    """Collectives to measure."""
    sizes: tuple[str, ...] = ("1MB", "10MB", "100MB", "1GB")
    """Message sizes; MB is 10^6 bytes, MiB 2^20."""
    world_sizes: tuple[int, ...] = ()
    """Numbers of ranks to start; by default 2 and 4. Leave this out under torchrun, Slurm or the
    lab, which start the ranks themselves."""
    warmup: int = 3
    """Warm-up calls before measuring, at least one."""
    steps: int = 20
    """Calls to measure."""
    device: DeviceName = "auto"
    """cuda measures NCCL between GPUs; cpu measures gloo."""
    time_limit_s: float = 20.0
    """Seconds of measuring per case; slow cases are measured with fewer calls."""
    timeout_s: float = 120.0
    """Seconds after which a collective without progress is an error."""

    def __post_init__(self) -> None:
        require_counts(warmup=(self.warmup,), steps=self.steps)
        if min(self.world_sizes, default=2) < 2:
            raise UsageError("--world-sizes must be at least 2")
        if not (self.time_limit_s > 0 and self.timeout_s > 0):
            raise UsageError("--time-limit-s and --timeout-s must be positive")

    def cases(self) -> "Iterator[CollectiveCase]":
        """Yields every combination of operation and size, smallest first."""
        sizes = sorted(parse_bytes(size) for size in self.sizes)
        for operation, size_bytes in itertools.product(self.operations, sizes):
            yield CollectiveCase(self, operation, size_bytes)


class CollectiveCase(NamedTuple):
    """One collective to measure."""

    sweep: CollectiveSweep
    operation: Operation
    size_bytes: int


CALIBRATED_OPERATIONS: tuple[Operation, ...] = (
    "all_reduce",
    "reduce_to_owners",
    "gather_from_owners",
)
"""Collectives used by the strategies that can be predicted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrationSweep(RankSweep):
    """Measure the speed of this machine on the parts of a training step."""

    model: tuple[ModelName, ...] = ("bytes-34M",)
    """Model presets whose matmuls and attention are timed."""
    batch: tuple[int, ...] = (4,)
    """Sequences per rank and step."""
    context: int = 128
    """Context length, in tokens."""
    time_limit_s: float = 45.0
    """Seconds for all measurements, about half for computing and half for communication. Starting
    ranks, and slow links, take extra time."""
    timeout_s: float = 120.0
    """Seconds after which a collective without progress is an error."""
    shape: ShapeOverrides = dataclasses.field(default_factory=ShapeOverrides)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model or not self.batch:
            raise UsageError("calibrate needs at least one --model and one --batch")

    def batches(self) -> Iterator[tuple[ModelShape, BatchShape]]:
        """Yields every model with every batch."""
        for name, num_sequences in itertools.product(self.model, self.batch):
            _, shape = self.shape.resolve(name, self.context)
            yield shape, BatchShape(num_sequences=num_sequences, context_length=self.context)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShapeCalibration(CalibrationSweep):
    """A calibration for models without a preset."""

    models: tuple[tuple[ModelShape, BatchShape], ...]
    """Model shapes, each with the batch of one rank."""

    def batches(self) -> Iterator[tuple[ModelShape, BatchShape]]:
        """Yields every model with its batch."""
        yield from self.models


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSweep:
    """Time forward, backward and optimizer of a language model, and measure its peak memory."""

    model: tuple[ModelName, ...] = ("small",)
    """Model presets to measure."""
    context: tuple[int, ...] = (128,)
    """Context lengths, in tokens."""
    batch: int = 4
    """Sequences per step."""
    phase: tuple[Phase, ...] = ("train",)
    """Parts of a step to run; train includes AdamW."""
    precision: tuple[PrecisionName, ...] = ("float32",)
    """dtypes to compute in; bfloat16 and float16 are autocast."""
    compile: bool = False
    """Compile the whole model with torch.compile."""
    compile_blocks: bool = False
    """Compile each block separately with torch.compile."""
    activation_checkpointing: Literal["none", "full"] = "none"
    """full recomputes each block's activations during backward."""
    attention: AttentionImplementation = "auto"
    """Attention implementation: auto uses torch's fused kernel, or Triton where the self-test found
    it right and faster; naive stores all attention scores."""
    warmup: tuple[int, ...] = (5,)
    """Numbers of warm-up steps before measuring."""
    steps: int = 10
    """Steps to measure."""
    device: DeviceName = "auto"
    """Device to run on."""
    shape: ShapeOverrides = dataclasses.field(default_factory=ShapeOverrides)
    limits: RunLimits = dataclasses.field(default_factory=RunLimits)

    def __post_init__(self) -> None:
        require_counts(warmup=self.warmup, steps=self.steps)
        if self.compile and self.compile_blocks:
            raise UsageError("--compile and --compile-blocks exclude each other; leave one out")

    @property
    def compilation(self) -> Compilation:
        """What torch.compile compiles."""
        if self.compile_blocks:
            return "blocks"
        return "whole" if self.compile else "none"

    def cases(self) -> "Iterator[StepCase]":
        """Yields every combination, models in the outer loop."""
        for name, context, phase, precision, warmup in itertools.product(
            self.model, self.context, self.phase, self.precision, self.warmup
        ):
            label, shape = self.shape.resolve(name, context)
            batch = BatchShape(num_sequences=self.batch, context_length=context)
            yield StepCase(self, label, shape, batch, phase, precision, warmup)


class StepCase(NamedTuple):
    """One training step to measure."""

    sweep: StepSweep
    model: str
    shape: ModelShape
    batch: BatchShape
    phase: Phase
    precision: PrecisionName
    warmup: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One of the strategies to compare."""

    strategy: StrategyName
    bucket_size_mb: BucketSize | None
    """Bucket size in MiB; None for strategies without buckets."""
    compression: Compression = "none"

    @property
    def label(self) -> str:
        """A short name of the variant."""
        size = self.bucket_size_mb
        words: list[str] = [self.strategy]
        if self.compression != "none":
            words.append(self.compression)
        if size is not None:
            words.append("auto" if size == "auto" else f"{size:g} MiB")
        return " ".join(words)


class DataParallelCase(NamedTuple):
    """One model under several strategies."""

    step: StepCase
    variants: tuple[Variant, ...]


AUTO_WARMUP = 5
"""Rounds until an automatic bucket size is in use: one warm-up, three observed, one to switch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategySweep(RankSweep):
    """Options of every measurement of strategies."""

    strategies: tuple[StrategyChoice, ...] = ("torch_ddp", "ddp")
    """Data-parallel strategies to compare; ratios are relative to the first one."""
    model: tuple[ModelName, ...] = ("small",)
    """Model presets to measure."""
    batch: int = 4
    """Sequences per rank and step."""
    context: int = 128
    """Context length, in tokens."""
    precision: PrecisionName = "float32"
    """dtype to compute in; bfloat16 and float16 are autocast."""
    activation_checkpointing: Literal["none", "full"] = "none"
    """full recomputes each block's activations during backward."""
    shape: ShapeOverrides = dataclasses.field(default_factory=ShapeOverrides)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_unscaled(self.strategies, self.precision)

    def step_sweep(self, *, warmup: int, steps: int) -> StepSweep:
        """Returns the sweep of steps to measure under every strategy."""
        return StepSweep(
            model=self.model,
            context=(self.context,),
            batch=self.batch,
            precision=(self.precision,),
            activation_checkpointing=self.activation_checkpointing,
            warmup=(warmup,),
            steps=steps,
            device=self.device,
            shape=self.shape,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataParallelSweep(StrategySweep):
    """Time training steps under several data-parallel strategies, interleaved on the same ranks."""

    bucket_size_mb: tuple[BucketSize, ...] = (DEFAULT_BUCKET_SIZE_MB,)
    """Bucket sizes in MiB, for the strategies that have buckets; auto is only for ddp."""
    compression: tuple[Compression, ...] = ("none",)
    """Compressions of gradients, for the strategies that have them: bf16, int8 and int4 for ddp and
    zero2; bf16, fp16 and powersgd for torch_ddp."""
    compile: bool = False
    """Compile the whole model with torch.compile."""
    compile_blocks: bool = False
    """Compile each block separately with torch.compile."""
    warmup: int = 5
    """Warm-up rounds before measuring; auto needs at least five."""
    rounds: int = 20
    """Rounds to measure; a round is one step of every strategy."""
    time_limit_s: float = 900.0
    """Seconds of rounds per model; the rounds until then, at least one, are the result."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_counts(warmup=(self.warmup,), steps=self.rounds, name="--rounds")
        if "auto" in self.bucket_size_mb and self.warmup < AUTO_WARMUP:
            raise UsageError(f"--warmup must be at least {AUTO_WARMUP} with --bucket-size-mb auto")
        if min((size for size in self.bucket_size_mb if size != "auto"), default=1) <= 0:
            raise UsageError("--bucket-size-mb must be positive, or auto")
        for compression in self.compression:
            for strategy in self.strategies[:1] if compression != "none" else ():
                if not any(compression in COMPRESSIONS.get(each, ()) for each in self.strategies):
                    require_compression(strategy, compression)

    def variants(self) -> Iterator[Variant]:
        """Yields every strategy with every bucket size and compression that applies to it."""
        for strategy in self.strategies:
            has_buckets = strategy in BUCKET_STRATEGIES
            known = ("none", *COMPRESSIONS.get(strategy, ()))
            compressions = [name for name in self.compression if name in known] or ["none"]
            sizes = self.bucket_size_mb if has_buckets else (None,)
            for size, compression in itertools.product(sizes, compressions):
                if size != "auto" or strategy == "ddp":
                    yield Variant(strategy=strategy, bucket_size_mb=size, compression=compression)

    def cases(self) -> Iterator[DataParallelCase]:
        """Yields one case per model, with all strategies."""
        variants = tuple(self.variants())
        steps = dataclasses.replace(
            self.step_sweep(warmup=self.warmup, steps=self.rounds),
            compile=self.compile,
            compile_blocks=self.compile_blocks,
        )
        for step in steps.cases() if variants else ():
            yield DataParallelCase(step, variants)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutSweep(RankSweep):
    """Time training steps of one batch under several layouts, interleaved on the same ranks."""

    layouts: tuple[str, ...] = ("replicate=2,micro=1", "pipeline=2,micro=1")
    """Layouts such as pipeline=2,interleave=2,micro=1. Keys: replicate, shard (with zero=2 or 3),
    context, tensor (with sp=1), pipeline, interleave, micro (sequences per micro-batch)."""
    model: tuple[ModelName, ...] = ("small",)
    """Model presets to measure."""
    batch_size: int = 8
    """Global batch size: sequences per step, over all ranks."""
    context: int = 128
    """Context length, in tokens."""
    shape: ShapeOverrides = dataclasses.field(default_factory=ShapeOverrides)
    warmup: int = 2
    """Warm-up rounds before measuring."""
    rounds: int = 10
    """Rounds to measure; a round is one step of every layout."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_counts(warmup=(self.warmup,), steps=self.rounds, name="--rounds")
        sizes = {spec.layout.world_size for spec in self.specs}
        if len({*sizes, self.world_size or next(iter(sizes), 1)}) > 1:
            found = ", ".join(f"{spec.text} has {spec.layout.world_size}" for spec in self.specs)
            given = "" if self.world_size is None else f", --world-size is {self.world_size}"
            raise UsageError(f"--layouts must all have the same number of ranks: {found}{given}")

    @property
    def specs(self) -> tuple[LayoutSpec, ...]:
        """The layouts, parsed."""
        return tuple(map(parse_layout, self.layouts))

    def cases(self) -> "Iterator[LayoutCase]":
        """Yields one case per model, with all layouts."""
        for name in self.model:
            case = LayoutCase(self, *self.shape.resolve(name, self.context))
            for spec in self.specs:
                _require_runs(case, spec)
            yield case


class LayoutCase(NamedTuple):
    """One model and batch under several layouts."""

    sweep: LayoutSweep
    model: str
    shape: ModelShape


def _require_runs(case: LayoutCase, spec: LayoutSpec) -> None:
    per_pass = spec.layout.data_parallel * spec.micro_batch
    batch_size = case.sweep.batch_size
    if batch_size % per_pass:
        raise UsageError(
            f"--layouts {spec.text}: --batch-size {batch_size} is not divisible by the "
            f"{per_pass} sequences of a pass; change --batch-size or micro"
        )
    work = Work(
        shape=case.shape,
        context_length=case.sweep.context,
        num_micro_batches=spec.num_micro_batches(batch_size),
    )
    require_runnable(spec.layout, work, f"--layouts {spec.text}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSweep(StrategySweep):
    """Measure the memory of a step with and without sharding, next to its prediction."""

    strategies: tuple[StrategyChoice, ...] = (
        "torch_ddp",
        "torch_zero",
        "zero1",
        "zero2",
        "fsdp",
        "torch_fsdp2",
    )
    """Strategies to measure, one after the other; a rank never holds two models."""
    bucket_size_mb: float = DEFAULT_BUCKET_SIZE_MB
    """Bucket size in MiB, for the strategies that have buckets."""
    warmup: int = 3
    """Warm-up steps between measuring memory and measuring times, at least one."""
    steps: int = 10
    """Steps whose times are measured."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_counts(warmup=(), steps=self.steps)
        if self.warmup < 1:
            raise UsageError("--warmup must be at least 1, to estimate the step time")
        if not self.bucket_size_mb > 0:
            raise UsageError("--bucket-size-mb must be positive")

    def cases(self) -> "Iterator[OptimizerCase]":
        """Yields every model with every strategy, models in the outer loop."""
        for step in self.step_sweep(warmup=self.warmup, steps=self.steps).cases():
            for strategy in self.strategies:
                size = self.bucket_size_mb if strategy in BUCKET_STRATEGIES else None
                yield OptimizerCase(step, Variant(strategy=strategy, bucket_size_mb=size))


class OptimizerCase(NamedTuple):
    """One model under one strategy."""

    step: StepCase
    variant: Variant
