"""Configuration shared by all sweeps and cases. Free of torch, for use by the command line.

Configuration of attention benchmarks. Free of torch, because the command line imports it.

Configuration of kernel compilation. Free of torch, because the command line imports it.

Configuration of collective benchmarks. Free of torch, because the command line imports it.

Configuration of calibration. Free of torch, because the command line imports it.

Configuration of step benchmarks on one rank. Free of torch, for use by the command line.

Configuration of strategy benchmarks. Free of torch, because the command line imports it.

Layouts written as text: ``pipeline=2,interleave=2,shard=2``.

Axes are named as in `ParallelLayout`; omitted axes are 1. ``shard`` shards parameters unless
``zero`` selects another stage; ``sp=1`` is sequence parallelism.
``micro`` is the number of sequences per micro-batch.

Configuration of layout benchmarks. Free of torch, because the command line imports it.

Configuration of optimizer memory benchmarks. Free of torch, for use by the command line.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Literal, NamedTuple, get_args

import tyro

from paceline.core.errors import ShapeError, UsageError
from paceline.core.plan import SHARDINGS, ParallelLayout
from paceline.core.presets import model_preset, preset_names, preset_spelling
from paceline.core.runnable import Work, require_runnable
from paceline.core.specs import (
    AttentionImplementation,
    AttentionKind,
    BatchShape,
    ModelShape,
    Phase,
    require_buildable,
    require_context,
)
from paceline.core.strategies import (
    BUCKET_STRATEGIES,
    DEFAULT_BUCKET_SIZE_MB,
    BucketSize,
    Operation,
    StrategyName,
    find_strategy,
    require_unscaled,
)
from paceline.core.units import parse_bytes

DeviceName = Literal["auto", "cpu", "cuda"]
PrecisionName = Literal["float32", "bfloat16", "float16"]
Compilation = Literal["none", "blocks", "whole"]


def listed(
    names: Iterable[str], parse: Callable[[str], str] = str
) -> tyro.constructors.PrimitiveConstructorSpec[str]:
    """Returns a parser for names that the help lists; other names are rejected where used."""
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=f"{{{','.join(names)}}}",
        instance_from_str=lambda words: parse(words[0]),
        is_instance=lambda value: isinstance(value, str),
        str_from_instance=lambda name: [name],
    )


ModelName = Annotated[str, listed(preset_names(), preset_spelling)]
"""A preset's name; a misspelt one gets a suggestion, which fixed choices would not give."""
StrategyChoice = Annotated[StrategyName, listed(get_args(StrategyName), find_strategy)]
"""A strategy's name, also with suggestions; zero2 means sharded."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimedCase:
    """A case that is timed in a separate process."""

    device: DeviceName
    warmup: int
    steps: int
    time_limit_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunLimits:
    """Memory and time limits of one case."""

    memory_limit_gib: float | None = None
    """Memory limit of one case in GiB; by default, most of the free memory. On CUDA, the limit only
    decides which cases are skipped; the device enforces its own limit."""
    time_limit_s: float = 300.0
    """Seconds of warm-up and measuring per case; the samples until then, at least one, are the
    result."""

    def __post_init__(self) -> None:
        if self.memory_limit_gib is not None and not 0 < self.memory_limit_gib < 2**30:
            raise UsageError("--memory-limit-gib must be positive and finite")
        if not self.time_limit_s > 0:
            raise UsageError("--time-limit-s must be positive")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankSweep:
    """Options of every measurement on several ranks."""

    world_size: int | None = None
    """Number of ranks to start; by default 2. Leave this out under torchrun, Slurm or the lab,
    which start the ranks themselves."""
    device: DeviceName = "auto"
    """cuda measures NCCL between GPUs; cpu measures gloo."""
    timeout_s: float = 300.0
    """Seconds after which a collective without progress is an error."""
    time_limit_s: float = 300.0
    """Seconds of measuring per case; the samples until then, at least one, are the result."""

    def __post_init__(self) -> None:
        if self.world_size is not None and self.world_size < 1:
            raise UsageError("--world-size must be at least 1")
        if not (self.time_limit_s > 0 and self.timeout_s > 0):
            raise UsageError("--time-limit-s and --timeout-s must be positive")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShapeOverrides:
    """Dimensions that override those of a model preset."""

    vocab_size: int | None = None
    """Vocabulary size."""
    d_model: int | None = None
    """Width of the residual stream."""
    d_ff: int | None = None
    """Width of the feed-forward layer."""
    num_layers: int | None = None
    """Number of transformer blocks."""
    num_heads: int | None = None
    """Query heads per attention layer."""
    tied_embeddings: bool = False
    """Reuse the embedding's weights in the output layer."""

    def apply(self, name: str) -> tuple[str, ModelShape]:
        """Returns the unchanged preset, or the modified shape under the name custom."""
        replaced = {
            field: value
            for field, value in dataclasses.asdict(self).items()
            if value is not None and value is not False
        }
        shape = model_preset(name)
        if not replaced:
            return name, shape
        return "custom", dataclasses.replace(shape, **replaced)


def require_counts(*, warmup: tuple[int, ...], steps: int, name: str = "--steps") -> None:
    """Raises unless there is something to measure."""
    if min(warmup, default=0) < 0:
        raise UsageError("--warmup must not be negative")
    if steps < 1:
        raise UsageError(f"{name} must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionCase(TimedCase):
    """One attention operation to measure, of a single head."""

    implementation: AttentionKind
    batch: BatchShape
    head_dim: int
    dtype: PrecisionName
    causal: bool
    compiled: bool


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

    def cases(self) -> Iterator[AttentionCase]:
        """Yields every combination; the implementations to compare are adjacent."""
        for dtype, head_dim, context, implementation in itertools.product(
            self.dtype, self.head_dim, self.context, self.implementation
        ):
            yield AttentionCase(
                implementation=implementation,
                batch=BatchShape(num_sequences=self.batch, context_length=context),
                head_dim=head_dim,
                dtype=dtype,
                causal=self.causal,
                compiled=self.compile,
                device=self.device,
                warmup=self.warmup,
                steps=self.steps,
                time_limit_s=self.limits.time_limit_s,
            )


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
        for values in itertools.product(
            self.architecture, self.dtype, self.head_dim, self.mask, self.lengths, self.group
        ):
            yield KernelCase(*values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveCase:
    """One collective to measure."""

    operation: Operation
    size_bytes: int
    warmup: int
    steps: int
    time_limit_s: float


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

    def cases(self) -> Iterator[CollectiveCase]:
        """Yields every combination of operation and size, smallest first."""
        for operation in self.operations:
            for size_bytes in sorted(parse_bytes(size) for size in self.sizes):
                yield CollectiveCase(
                    operation=operation,
                    size_bytes=size_bytes,
                    warmup=self.warmup,
                    steps=self.steps,
                    time_limit_s=self.time_limit_s,
                )


CALIBRATED_OPERATIONS: tuple[Operation, ...] = (
    "all_reduce",
    "reduce_to_owners",
    "gather_from_owners",
)
"""Collectives used by the strategies that can be predicted."""


class LinearShape(NamedTuple):
    """A linear layer applied to a batch."""

    tokens: int
    inputs: int
    outputs: int


class AttentionShape(NamedTuple):
    """Causal attention of a batch."""

    batch: int
    context: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


class ComputeShapes(NamedTuple):
    """Shapes to time, each once."""

    linears: tuple[LinearShape, ...]
    attentions: tuple[AttentionShape, ...]


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
            _, shape = self.shape.apply(name)
            require_buildable(shape)
            require_context(name, shape, self.context)
            yield shape, BatchShape(num_sequences=num_sequences, context_length=self.context)

    def compute_shapes(self) -> ComputeShapes:
        """Returns the shapes to time, each once."""
        # Imported here, because parsing flags must not load NumPy.
        from paceline.accounting.flops import model_segments

        batches = list(self.batches())
        linears = [
            LinearShape(batch.tokens_per_pass, linear.inputs, linear.outputs)
            for shape, batch in batches
            for segment in model_segments(shape)
            for linear in segment.linears
        ]
        attentions = [
            AttentionShape(
                batch=batch.num_sequences,
                context=batch.context_length,
                num_heads=shape.num_heads,
                num_kv_heads=shape.key_value_heads,
                head_dim=shape.head_width,
            )
            for shape, batch in batches
        ]
        return ComputeShapes(tuple(dict.fromkeys(linears)), tuple(dict.fromkeys(attentions)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShapeCalibration(CalibrationSweep):
    """A calibration for models without a preset."""

    models: tuple[tuple[ModelShape, BatchShape], ...]
    """Model shapes, each with the batch of one rank."""

    def batches(self) -> Iterator[tuple[ModelShape, BatchShape]]:
        """Yields every model with its batch."""
        yield from self.models


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCase(TimedCase):
    """One training step to measure."""

    model: str
    shape: ModelShape
    batch: BatchShape
    phase: Phase
    precision: PrecisionName
    compilation: Compilation
    activation_checkpointing: Literal["none", "full"]
    attention: AttentionImplementation


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

    def cases(self) -> Iterator[StepCase]:
        """Yields every combination, models in the outer loop."""
        compilation: Compilation = "whole" if self.compile else "none"
        if self.compile_blocks:
            compilation = "blocks"
        for name, context, phase, precision, warmup in itertools.product(
            self.model, self.context, self.phase, self.precision, self.warmup
        ):
            label, shape = self.shape.apply(name)
            require_buildable(shape)
            require_context(name, shape, context)
            yield StepCase(
                model=label,
                shape=shape,
                batch=BatchShape(num_sequences=self.batch, context_length=context),
                phase=phase,
                precision=precision,
                compilation=compilation,
                activation_checkpointing=self.activation_checkpointing,
                attention=self.attention,
                device=self.device,
                warmup=warmup,
                steps=self.steps,
                time_limit_s=self.limits.time_limit_s,
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One of the strategies to compare."""

    strategy: StrategyName
    bucket_size_mb: BucketSize | None
    """Bucket size in MiB; None for strategies without buckets."""

    @property
    def label(self) -> str:
        """A short name of the variant."""
        size = self.bucket_size_mb
        if size is None:
            return self.strategy
        return f"{self.strategy} auto" if size == "auto" else f"{self.strategy} {size:g} MiB"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataParallelCase:
    """One model under several strategies."""

    step: StepCase
    variants: tuple[Variant, ...]


AUTO_WARMUP = 5
"""Rounds until an automatic bucket size is in use: one warm-up, three observed, one to switch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategySweep(RankSweep):
    """Options of every measurement of strategies."""

    strategies: tuple[StrategyChoice, ...] = ("torch_ddp", "bucketed")
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
    """Bucket sizes in MiB, for the strategies that have buckets; auto is only for bucketed."""
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

    @property
    def num_rounds(self) -> int:
        """Warm-up and measured rounds together."""
        return self.warmup + self.rounds

    def variants(self) -> Iterator[Variant]:
        """Yields every strategy with every bucket size that applies to it."""
        for strategy in self.strategies:
            has_buckets = strategy in BUCKET_STRATEGIES
            for size in self.bucket_size_mb if has_buckets else (None,):
                if size != "auto" or strategy == "bucketed":
                    yield Variant(strategy=strategy, bucket_size_mb=size)

    def cases(self) -> Iterator[DataParallelCase]:
        """Yields one case per model, with all strategies."""
        variants = tuple(self.variants())
        steps = dataclasses.replace(
            self.step_sweep(warmup=self.warmup, steps=self.rounds),
            compile=self.compile,
            compile_blocks=self.compile_blocks,
        )
        for step in steps.cases() if variants else ():
            yield DataParallelCase(step=step, variants=variants)


_AXES = ("replicate", "shard", "context", "tensor", "pipeline")
_KNOWN = (*_AXES, "interleave", "zero", "micro", "sp")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WrittenLayout:
    """A layout and the size of its micro-batches."""

    layout: ParallelLayout
    micro_batch: int
    """Sequences per forward pass."""

    @property
    def text(self) -> str:
        """The layout as text, without axes of size 1."""
        layout = self.layout
        numbers = {axis: getattr(layout, axis) for axis in _AXES}
        numbers["interleave"] = layout.pipeline_interleave
        words = [f"{name}={number}" for name, number in numbers.items() if number > 1]
        stage = SHARDINGS.index(layout.sharding)
        words += [f"zero={stage}"] if stage else []
        words += ["sp=1"] if layout.sequence_parallel else []
        return ",".join([*words, f"micro={self.micro_batch}"])

    def num_micro_batches(self, batch_size: int) -> int:
        """Returns the number of micro-batches of a data-parallel rank per step."""
        return batch_size // (self.layout.data_parallel * self.micro_batch)


def parse_layout(text: str) -> WrittenLayout:
    """Parses a layout from text; an error names the invalid part.

    Args:
        text: A layout such as ``pipeline=2,micro=1``.
    """
    numbers: dict[str, int] = {}
    for word in filter(None, text.split(",")):
        name, _, value = word.partition("=")
        if name not in _KNOWN or not value.isdecimal():
            raise UsageError(
                f"layout {text!r}: {word!r} is not one of {', '.join(_KNOWN)} with a number, such "
                "as pipeline=2"
            )
        if name in numbers:
            raise UsageError(f"layout {text!r}: {name} is given twice; leave one of them out")
        numbers[name] = int(value)
    shard = numbers.get("shard", 1)
    stage = numbers.get("zero", 3 if shard > 1 else 0)
    if stage >= len(SHARDINGS):
        raise UsageError(f"layout {text!r}: zero={stage} is not a ZeRO stage; use 0, 1, 2 or 3")
    if numbers.get("micro") == 0:
        raise UsageError(f"layout {text!r}: micro=0 has no sequences; use 1 or more")
    try:
        layout = ParallelLayout(
            replicate=numbers.get("replicate", 1),
            shard=shard,
            context=numbers.get("context", 1),
            tensor=numbers.get("tensor", 1),
            pipeline=numbers.get("pipeline", 1),
            pipeline_interleave=numbers.get("interleave", 1),
            sharding=SHARDINGS[stage],
            sequence_parallel=bool(numbers.get("sp", 0)),
        )
    except ShapeError as error:
        raise UsageError(f"layout {text!r}: {error}") from error
    return WrittenLayout(layout=layout, micro_batch=numbers.get("micro", 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutCase:
    """One model and batch under several layouts."""

    model: str
    shape: ModelShape
    batch_size: int
    """Sequences per step, over all ranks."""
    context_length: int
    layouts: tuple[WrittenLayout, ...]
    warmup: int
    rounds: int

    def num_micro_batches(self, written: WrittenLayout) -> int:
        """Returns the number of micro-batches of a data-parallel rank per step."""
        return written.num_micro_batches(self.batch_size)


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
        written = [parse_layout(text) for text in self.layouts]
        sizes = {each.layout.world_size for each in written}
        if len({*sizes, self.world_size or next(iter(sizes), 1)}) > 1:
            found = ", ".join(f"{each.text} has {each.layout.world_size}" for each in written)
            given = "" if self.world_size is None else f", --world-size is {self.world_size}"
            raise UsageError(f"--layouts must all have the same number of ranks: {found}{given}")

    def cases(self) -> Iterator[LayoutCase]:
        """Yields one case per model, with all layouts."""
        for name in self.model:
            label, shape = self.shape.apply(name)
            require_buildable(shape)
            require_context(name, shape, self.context)
            case = LayoutCase(
                model=label,
                shape=shape,
                batch_size=self.batch_size,
                context_length=self.context,
                layouts=tuple(parse_layout(text) for text in self.layouts),
                warmup=self.warmup,
                rounds=self.rounds,
            )
            for written in case.layouts:
                _require_runs(case, written)
            yield case


def _require_runs(case: LayoutCase, written: WrittenLayout) -> None:
    per_pass = written.layout.data_parallel * written.micro_batch
    if case.batch_size % per_pass:
        raise UsageError(
            f"--layouts {written.text}: --batch-size {case.batch_size} is not divisible by the "
            f"{per_pass} sequences of a pass; change --batch-size or micro"
        )
    work = Work(
        shape=case.shape,
        context_length=case.context_length,
        num_micro_batches=case.num_micro_batches(written),
    )
    require_runnable(written.layout, work, f"--layouts {written.text}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerCase:
    """One model under one strategy."""

    step: StepCase
    variant: Variant


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSweep(StrategySweep):
    """Measure the memory of a step with and without sharding, next to its prediction."""

    strategies: tuple[StrategyChoice, ...] = (
        "torch_ddp",
        "torch_zero",
        "sharded_optimizer",
        "sharded",
        "fully_sharded",
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

    def cases(self) -> Iterator[OptimizerCase]:
        """Yields every model with every strategy, models in the outer loop."""
        for step in self.step_sweep(warmup=self.warmup, steps=self.steps).cases():
            for strategy in self.strategies:
                size = self.bucket_size_mb if strategy in BUCKET_STRATEGIES else None
                variant = Variant(strategy=strategy, bucket_size_mb=size)
                yield OptimizerCase(step=step, variant=variant)
