"""Config of a training run: the single definition behind the TOML format, flags and template.

Torch-free, because the command line imports it. Every section is frozen and validates itself.
`paceline train init` prints the docstring below each field as a comment.
"""

import dataclasses
import math
from typing import Any, Literal

from paceline.core.errors import UsageError
from paceline.core.hardware import DeviceName
from paceline.core.outer import OuterCompression, OuterSettings, default_update
from paceline.core.presets import model_preset
from paceline.core.specs import ModelShape, require_context
from paceline.core.strategies import (
    BUCKET_STRATEGIES,
    DEFAULT_BUCKET_SIZE_MB,
    Compression,
    StrategyName,
    find_strategy,
    require_compression,
)
from paceline.core.units import GB
from paceline.data.loader.config import LoaderConfig, SourceConfig
from paceline.health.config import HealthConfig

OptimizerName = Literal["adamw", "muon"]
ScheduleName = Literal["cosine", "wsd", "constant"]
SinkName = Literal["tensorboard", "wandb", "mlflow"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model to train."""

    preset: str = "bytes-6M"
    """Model preset; the fields below override it."""
    hugging_face: str | None = None
    """Directory of a Hugging Face causal language model to train instead. If it has no weights,
    they are initialized from training.seed."""
    vocab_size: int | None = None
    """Vocabulary size of the embedding, at least that of the tokenizer."""
    d_model: int | None = None
    """Width of the residual stream."""
    d_ff: int | None = None
    """Width of the feed-forward layer."""
    num_layers: int | None = None
    """Number of transformer blocks."""
    num_heads: int | None = None
    """Query heads per attention layer."""
    num_kv_heads: int | None = None
    """Key-value heads (grouped-query attention)."""
    head_dim: int | None = None
    """Dimension of a head; by default d_model / num_heads."""
    max_context_length: int | None = None
    """Maximum context length of the model, in tokens."""
    tied_embeddings: bool | None = None
    """Whether the output layer reuses the embedding's weights."""
    rope_theta: float | None = None
    """Base of the rotary position embedding (RoPE)."""
    norm_epsilon: float | None = None
    """Epsilon of RMSNorm, added to the mean square."""
    activation_checkpointing: Literal["none", "full"] = "none"
    """Recompute each block's activations during backward instead of keeping them."""
    compile_blocks: bool = False
    """Compile each block separately with torch.compile."""

    def __post_init__(self) -> None:
        if self.hugging_face is None:
            return
        for name in self._changes():
            raise UsageError(
                f"model.{name} changes a preset, and model.hugging_face takes its shape from "
                "config.json; leave one of them out"
            )
        for name in ("activation_checkpointing", "compile_blocks"):
            if getattr(self, name) not in ("none", False):
                raise UsageError(
                    f"model.{name} is for Paceline's own model, not for model.hugging_face; leave "
                    "it out"
                )

    @property
    def shape(self) -> ModelShape:
        """The preset with its overrides applied."""
        if self.hugging_face is not None:
            raise UsageError(
                f"model.hugging_face {self.hugging_face}: its shape is in config.json, and losses "
                "are predicted from runs of Paceline's own model only"
            )
        return dataclasses.replace(model_preset(self.preset), **self._changes())

    def _changes(self) -> dict[str, Any]:
        """Returns the dimensions that override the preset."""
        return {name: value for name, value in dimensions(self).items() if value is not None}


def dimensions(model: ModelShape | ModelConfig) -> dict[str, Any]:
    """Returns the dimensions of a model that a config can set, by name."""
    known = {field.name for field in dataclasses.fields(ModelShape)}
    names = [field.name for field in dataclasses.fields(ModelConfig) if field.name in known]
    return {name: getattr(model, name) for name in names}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Training data."""

    sources: tuple[SourceConfig, ...]
    """Prepared datasets, each with its weight in the mixture."""
    context_length: int = 256
    """Context length: tokens per sequence."""
    window: int | None = None
    """Samples per shuffle window, for data in S3; by default, the whole epoch is shuffled."""
    cache_directory: str | None = None
    """Directory that caches shards from S3."""
    cache_bytes: int = 100 * GB
    """Maximum size of that cache in bytes."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise UsageError("data.sources is empty; name a dataset of paceline data prepare")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepConfig:
    """Number of steps, batch size, precision and gradient clipping."""

    steps: int = 200
    """Number of training steps; the learning-rate schedule ends at the last one."""
    batch_size: int = 16
    """Global batch size: sequences per step, over all ranks."""
    micro_batch_size: int = 8
    """Sequences per micro-batch of a rank; gradients are accumulated over its micro-batches."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """dtype to compute in; bfloat16 is autocast over float32 weights."""
    clip_norm: float = 1.0
    """Maximum norm of all gradients, to which they are clipped; 0 for no clipping."""
    seed: int = 0
    """Random seed of the initial weights and the order of the training data."""
    deterministic: bool = False
    """Use deterministic operations only; an operation that is not deterministic is an error."""

    def __post_init__(self) -> None:
        _require_positive("training", self, "steps", "batch_size", "micro_batch_size")
        if not self.clip_norm >= 0:
            raise UsageError(f"training.clip_norm {self.clip_norm} must not be negative")

    def num_passes(self, data_ranks: int) -> int:
        """Returns the number of micro-batches per rank and step."""
        return num_passes(self.batch_size, data_ranks, self.micro_batch_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer and its hyperparameters."""

    name: OptimizerName = "adamw"
    """adamw, or muon for the matrices of the blocks and adamw for all other parameters."""
    learning_rate: float = 3e-4
    """Peak learning rate."""
    muon_learning_rate: float = 0.02
    """Peak learning rate of the parameters that Muon trains."""
    beta1: float = 0.9
    """Decay rate of the first moment."""
    beta2: float = 0.95
    """Decay rate of the second moment."""
    epsilon: float = 1e-8
    """Epsilon of AdamW, added to the square root of the second moment."""
    weight_decay: float = 0.1
    """Weight decay of matrices; vectors (norms, biases) are not decayed."""

    def __post_init__(self) -> None:
        _require_positive("optimizer", self, "learning_rate", "muon_learning_rate", "epsilon")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(
                    f"optimizer.{name} {getattr(self, name)} must be from 0 to below 1"
                )
        if not self.weight_decay >= 0:
            raise UsageError(f"optimizer.weight_decay {self.weight_decay} must not be negative")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning-rate schedule."""

    name: ScheduleName = "cosine"
    """cosine, wsd (warm-up, stable, decay) or constant."""
    warmup_steps: int = 10
    """Warm-up steps, from zero to the peak learning rate."""
    decay_fraction: float = 0.2
    """Fraction of the run over which wsd decays the learning rate."""
    final_fraction: float = 0.1
    """Final learning rate, as a fraction of the peak."""

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise UsageError(f"schedule.warmup_steps {self.warmup_steps} must not be negative")
        for name in ("decay_fraction", "final_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"schedule.{name} {getattr(self, name)} must be from 0 to 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OuterConfig:
    """Sites with slow links: each trains its own copy of the model, and they average it rarely."""

    sites: int = 1
    """Number of sites; the first ranks are those of the first site, and so on. parallel.strategy
    is that of the ranks of a site. With 1, the keys below have no effect."""
    every_steps: int = 30
    """Steps between two exchanges of the same parameters."""
    fragments: int = 1
    """Parts of the parameters that are sent one after the other, spread over every_steps."""
    delay_steps: int = 0
    """Steps for which training goes on while a fragment is in flight; 0 to wait for it."""
    learning_rate: float | None = None
    """Learning rate of the outer optimizer; by default 1 in a run of fewer than 100 rounds, which
    with no momentum sets parameters to their mean, and in longer runs the published 0.7."""
    momentum: float | None = None
    """Its Nesterov momentum; by default 0 in a run of fewer than 100 rounds, and else the published
    0.9."""
    compression: OuterCompression = "int4"
    """How parameters are sent between sites, both ways: none is float32; int8 and int4 need the
    extra compression to be fast on CPUs."""

    def __post_init__(self) -> None:
        if self.sites < 1:
            raise UsageError(f"parallel.outer.sites {self.sites} must be 1 or more")
        self.settings(self.every_steps)  # Raises if they do not fit together.

    def settings(self, num_steps: int) -> OuterSettings:
        """Returns the settings for a run of so many steps."""
        learning_rate, momentum = default_update(num_steps / max(1, self.every_steps))
        try:
            return OuterSettings(
                every_steps=self.every_steps,
                fragments=self.fragments,
                delay_steps=self.delay_steps,
                learning_rate=learning_rate if self.learning_rate is None else self.learning_rate,
                momentum=momentum if self.momentum is None else self.momentum,
                compression=self.compression,
            )
        except UsageError as error:
            raise UsageError(f"parallel.outer: {error}") from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Parallelism: how the ranks share the work."""

    strategy: StrategyName = "ddp"
    """Data-parallel strategy, as in paceline bench ddp; not used by a single rank. With any of the
    axes below, it says what is sharded, and torch's FSDP2 shards it."""
    tensor: int = 1
    """Tensor-parallel ranks, over which each matrix is split."""
    sequence_parallel: bool = False
    """Whether tensor-parallel ranks also split norms and residuals over the sequence."""
    context: int = 1
    """Context-parallel ranks, over which each sequence is split."""
    pipeline: int = 1
    """Pipeline-parallel ranks, over which the blocks are split."""
    interleave: int = 1
    """Virtual stages per pipeline rank (interleaved 1F1B)."""
    replicate: int = 1
    """Replicas of the sharded states, each sharded over the ranks that the axes leave over."""
    bucket_size_mb: float = DEFAULT_BUCKET_SIZE_MB
    """Bucket size in MiB, for the strategies that have buckets."""
    compression: Compression = "none"
    """How ddp and zero2 send gradients: bf16, int8 or int4 (needs the extra compression); with
    int8 and int4, what a step's messages leave out is sent with the next step's. torch_ddp has bf16
    and fp16."""
    device: DeviceName = "auto"
    """auto uses the accelerator if there is one."""
    timeout_s: float = 600.0
    """Seconds after which an unresponsive rank ends the run."""
    elastic: Literal["none", "replicas"] = "none"
    """replicas: each rank is a replica that may fail and rejoin while the others continue to train
    (needs the extra elastic)."""
    elastic_batch: Literal["kept", "live"] = "kept"
    """Batch of a step when a replica is missing: kept keeps training.batch_size, and the other
    replicas accumulate more; live leaves out the share of missing replicas."""
    heartbeat_timeout_s: float = 5.0
    """Seconds without a heartbeat after which a replica counts as lost."""
    replica_timeout_s: float = 60.0
    """Seconds after which a replica that is alive but unresponsive counts as lost."""
    outer: OuterConfig = dataclasses.field(default_factory=OuterConfig)

    def __post_init__(self) -> None:
        object.__setattr__(self, "strategy", find_strategy(self.strategy))
        _require_positive("parallel", self, "bucket_size_mb", "timeout_s")
        _require_positive("parallel", self, "heartbeat_timeout_s", "replica_timeout_s")
        axes = ("tensor", "context", "pipeline", "interleave", "replicate")
        _require_positive("parallel", self, *axes)
        has_mesh = any(getattr(self, axis) > 1 for axis in axes)
        self._require_compression(has_mesh)
        if self.outer.sites > 1:
            self._require_sites(has_mesh)
        if self.elastic == "replicas" and any(getattr(self, axis) > 1 for axis in axes):
            raise UsageError(
                "parallel.elastic replicas has one rank in each replica; leave parallel.tensor and "
                "the other axes at 1"
            )
        if self.elastic == "replicas" and self.strategy != "ddp":
            raise UsageError(
                f"parallel.elastic replicas keeps a whole model on every rank, which "
                f"parallel.strategy {self.strategy} does not; use ddp"
            )

    def _require_compression(self, has_mesh: bool) -> None:
        require_compression(self.strategy, self.compression)
        if self.compression == "powersgd":
            raise UsageError(
                "parallel.compression powersgd keeps state that torch's checkpoints do not have; "
                "use int4, or measure it with paceline bench ddp"
            )
        if self.compression != "none" and (has_mesh or self.elastic == "replicas"):
            raise UsageError(
                f"parallel.compression {self.compression} is for data-parallel ranks only; leave "
                "parallel.tensor and the other axes at 1, and parallel.elastic none"
            )

    def _require_sites(self, has_mesh: bool) -> None:
        sites = f"parallel.outer.sites {self.outer.sites}"
        if has_mesh or self.elastic == "replicas":
            raise UsageError(
                f"{sites} has data-parallel ranks only inside a site; leave parallel.tensor and "
                "the other axes at 1, and parallel.elastic none"
            )
        if self.compression != "none":
            raise UsageError(
                f"{sites} compresses with parallel.outer.compression between sites, and not inside "
                "a site; leave parallel.compression none"
            )

    @property
    def default_ranks(self) -> int:
        """Ranks to start on a host without GPUs: one per site.

        A replica alone has no other to heal from.
        """
        return 2 if self.elastic == "replicas" else self.outer.sites

    def site_ranks(self, world_size: int) -> int:
        """Returns the number of ranks of each site; raises if sites would differ."""
        ranks, remainder = divmod(world_size, self.outer.sites)
        if remainder or not ranks:
            raise UsageError(
                f"parallel.outer.sites {self.outer.sites} need equally many ranks each, and there "
                f"are {world_size}; start a multiple of {self.outer.sites}"
            )
        return ranks

    def strategy_on(self, world_size: int) -> StrategyName:
        """Returns the strategy of so many ranks of a site; always "none" for a single rank."""
        return self.strategy if world_size > 1 else "none"

    def bucket_size_for(self, strategy: StrategyName) -> float | None:
        """Returns the bucket size, or None if the strategy has no buckets."""
        return self.bucket_size_mb if strategy in BUCKET_STRATEGIES else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints, from which an interrupted run resumes."""

    every_steps: int = 100
    """Steps between checkpoints; the last step always saves one."""
    keep_last: int = 2
    """Number of checkpoints to keep; older ones are removed."""
    asynchronous: bool = True
    """Write checkpoints while training continues."""
    grace_s: float = 25.0
    """Seconds to finish the step and save a checkpoint when the run is asked to stop; torchrun and
    Slurm wait for 30 by default."""
    memory_every_steps: int = 0
    """Steps between checkpoints in host memory, each shard with a replica on the next host; 0 for
    none."""
    memory_directory: str = "/dev/shm"
    """A tmpfs on every host, for checkpoints in host memory."""

    def __post_init__(self) -> None:
        _require_positive("checkpoint", self, "every_steps", "keep_last", "grace_s")
        if self.memory_every_steps < 0:
            raise UsageError(
                f"checkpoint.memory_every_steps {self.memory_every_steps} must not be negative"
            )

    def is_due_in_memory(self, step: int) -> bool:
        """Returns whether a step is checkpointed in memory; steps saved to disk are not."""
        return (
            self.memory_every_steps > 0
            and step % self.memory_every_steps == 0
            and step % self.every_steps != 0
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Evaluation on held-out text, and text samples."""

    every_steps: int = 100
    """Steps between evaluations; the last step is always evaluated."""
    sequences: int = 64
    """Held-out sequences, the same in every evaluation; 0 for no evaluation."""
    sample_prompt: str | None = None
    """Prompt that the model continues after each evaluation."""
    sample_tokens: int = 64
    """Tokens to generate after the prompt."""

    def __post_init__(self) -> None:
        _require_positive("evaluation", self, "every_steps", "sample_tokens")
        if self.sequences < 0:
            raise UsageError(f"evaluation.sequences {self.sequences} must not be negative")
        if self.sample_prompt is not None and not self.sequences:
            raise UsageError(
                "evaluation.sample_prompt is continued after each evaluation, and "
                "evaluation.sequences 0 turns evaluation off; set it to 1 or more"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Logging and experiment trackers."""

    every_steps: int = 10
    """Steps between log lines, and between samples of memory and exposed communication."""
    sinks: tuple[SinkName, ...] = ()
    """Experiment trackers that also receive the metrics: tensorboard, wandb, mlflow."""

    def __post_init__(self) -> None:
        _require_positive("logging", self, "every_steps")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A training run."""

    out: str
    """Directory of the run: config, metrics, checkpoints."""
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig
    training: StepConfig = dataclasses.field(default_factory=StepConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
    logging: LoggingConfig = dataclasses.field(default_factory=LoggingConfig)
    watch: HealthConfig = dataclasses.field(default_factory=HealthConfig)

    def __post_init__(self) -> None:
        if self.model.hugging_face is None:
            require_context(self.model.preset, self.model.shape, self.data.context_length)
        elif self.optimizer.name == "muon":
            raise UsageError(
                "optimizer.name muon trains the matrices of Paceline's own blocks, and "
                "model.hugging_face has others; use adamw"
            )
        if self.parallel.elastic == "replicas" and self.checkpoint.memory_every_steps:
            raise UsageError(
                "parallel.elastic replicas already restores state from another replica's memory; "
                "leave checkpoint.memory_every_steps at 0"
            )
        if self.parallel.outer.sites > 1 and self.checkpoint.memory_every_steps:
            raise UsageError(
                "parallel.outer.sites have checkpoints on disk only; leave "
                "checkpoint.memory_every_steps at 0"
            )
        if self.schedule.warmup_steps > self.training.steps:
            raise UsageError(
                f"schedule.warmup_steps {self.schedule.warmup_steps} is more than training.steps "
                f"{self.training.steps}"
            )

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step, over all ranks."""
        return self.training.batch_size * self.data.context_length

    def loader(self, split: Literal["train", "heldout"] = "train") -> LoaderConfig:
        """Returns the loader config of a split."""
        return LoaderConfig(
            sources=self.data.sources,
            split=split,
            context_length=self.data.context_length,
            batch_size=self.training.batch_size,
            # Runs with different seeds must be compared on the same held-out text.
            seed=self.training.seed if split == "train" else 0,
            window=self.data.window if split == "train" else None,
            cache_directory=self.data.cache_directory,
            cache_bytes=self.data.cache_bytes,
        )


def num_passes(batch_size: int, data_ranks: int, micro_batch_size: int) -> int:
    """Returns the number of passes that the rank with the most sequences needs."""
    largest_part = -(-batch_size // data_ranks)
    return -(-largest_part // micro_batch_size)


def _require_positive(section: str, owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not (value > 0 and math.isfinite(value)):
            raise UsageError(f"{section}.{name} {value} must be positive")
