"""Resolves a run before any rank starts: its layout, parameters, FLOPs, memory and time."""

import dataclasses
import pathlib
from collections.abc import Sequence

import msgspec

from paceline.accounting.counts import count_parameters, flops_per_token
from paceline.accounting.memory.model_states import compression_bytes
from paceline.accounting.memory.step import MemoryParts, step_memory
from paceline.accounting.model_config import CONFIG, model_of_config, read_config_json
from paceline.core.errors import RecordError, UsageError
from paceline.core.plan import Estimate, ParallelLayout
from paceline.core.runnable import Work, needs_mesh, require_runnable
from paceline.core.specs import BatchShape, ModelShape, nearest_buildable, precision_preset
from paceline.core.strategies import StrategyName, sharding_of
from paceline.core.units import format_binary_bytes
from paceline.predict.calibration import Calibration, calibrations, inside_host
from paceline.predict.history import HistoryEntry, Quantity, corrected, history_path, read_history
from paceline.predict.step import PREDICTED, layout_step_time, strategy_step_terms
from paceline.predict.trainer_memory import trainer_memory
from paceline.records import RecordStore
from paceline.training.config import ModelConfig, RunConfig

MEMORY_REMEDY = (
    "lower training.micro_batch_size, set model.activation_checkpointing to full, use "
    "parallel.strategy fsdp, or start fewer ranks per host"
)
_NEVER_SAVED: dict[StrategyName, StrategyName] = {"torch_zero": "zero1"}
"""Strategies whose optimizer no checkpoint can hold, each with one that shards the same state."""


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """Size, limits and predictions of a run, made before its first step.

    A dense Hugging Face model has the memory and time of Paceline's own model with the same
    matrices, without an interval: the history has runs of Paceline's own model only. Of other
    Hugging Face models, only the steps and tokens are known. The run's directory keeps the forecast
    as JSON.
    """

    num_steps: int
    tokens_per_step: int
    num_parameters: int | None = None
    flops_per_step: float | None = None
    """FLOPs of all ranks, forward and backward."""
    memory_bytes: int | None = None
    """Peak memory of a step's tensors, on the rank that needs most."""
    memory: MemoryParts | None = None
    """The same memory by what it holds."""
    kept_in_memory_bytes: int = 0
    """Host memory per rank for in-memory checkpoints; 0 without them. Covers the rank's own shard
    and a replica of another's, both twice while a save is in flight, and the staging copy."""
    step_time_s: float | None = None
    """Predicted from a calibration of the machine; None without one."""
    corrected: dict[Quantity, Estimate] = {}
    """Step time and memory, corrected by earlier runs on the same hardware, with intervals."""
    peak_flops_per_s: float | None = None
    """Peak FLOP/s of all ranks together; None if no document states it."""
    memory_limit_bytes: int | None = None
    """Memory that a rank may use; None if unknown."""
    final_loss: Estimate | None = None
    """Final loss, predicted from smaller runs; None without them."""

    @property
    def tokens(self) -> int:
        """Tokens that the run trains on."""
        return self.tokens_per_step * self.num_steps

    @property
    def flops(self) -> float | None:
        """FLOPs of the whole run."""
        return None if self.flops_per_step is None else self.flops_per_step * self.num_steps

    @property
    def formulas(self) -> dict[Quantity, float]:
        """Uncorrected predictions."""
        known: dict[Quantity, float | None] = {
            "step_time_s": self.step_time_s,
            "memory_bytes": self.memory_bytes,
        }
        return {quantity: float(value) for quantity, value in known.items() if value is not None}

    @property
    def duration_s(self) -> float | None:
        """Total time of all steps, without evaluations and checkpoints."""
        return None if self.step_time_s is None else self.step_time_s * self.num_steps

    @property
    def step_time(self) -> Estimate | None:
        """Step time to compare with the measured one, with its interval; None if not predicted."""
        if self.step_time_s is None:
            return None
        return self.corrected.get("step_time_s") or Estimate(value=self.step_time_s)

    @property
    def process_memory(self) -> Estimate | None:
        """Memory of a rank's process, with its interval; None if no earlier runs show it."""
        memory = self.corrected.get("memory_bytes")
        return None if memory is None or memory.low is None else memory

    def tokens_per_s(self, step_time_s: float) -> float:
        """Returns the throughput of all ranks, in tokens per second."""
        return self.tokens_per_step / step_time_s

    def utilization(self, step_time_s: float) -> float | None:
        """Returns the model FLOPs utilization (MFU) of a step; None if the peak is unknown."""
        if self.peak_flops_per_s is None or self.flops_per_step is None:
            return None
        return self.flops_per_step / step_time_s / self.peak_flops_per_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResolvedRun:
    """A run on a number of ranks, resolved once and handed down."""

    config: RunConfig
    layout: ParallelLayout
    """Over all ranks; of a run with replicas, over all replicas."""
    forecast: Forecast


def resolve(
    config: RunConfig,
    num_ranks: int,
    calibration: pathlib.Path | None = None,
    hardware: str | None = None,
    *,
    on_accelerator: bool | None = None,
) -> ResolvedRun:
    """Resolves a run, with the user's earlier runs as history; arguments as in `forecast`."""
    layout = layout_of(config, num_ranks)
    predicted = forecast(
        config,
        num_ranks,
        calibration,
        history=_earlier_runs(),
        hardware=hardware,
        layout=layout,
        on_accelerator=on_accelerator,
    )
    return ResolvedRun(config=config, layout=layout, forecast=predicted)


def forecast(
    config: RunConfig,
    world_size: int,
    calibration: pathlib.Path | None = None,
    *,
    at_once: int = 1,
    history: Sequence[HistoryEntry] = (),
    hardware: str | None = None,
    layout: ParallelLayout | None = None,
    on_accelerator: bool | None = None,
) -> Forecast:
    """Predicts a run.

    Args:
        config: The run.
        world_size: Number of ranks.
        calibration: Records of ``paceline calibrate`` for ``world_size * at_once`` ranks. They do
            not measure packing or slow links: the time of steps with compressed gradients or
            several sites is not predicted.
        at_once: Number of such runs that share the machine.
        history: Earlier predictions and measurements.
        hardware: The machine, to select from the history; by default that of the calibration.
        layout: Its layout, if it is already known.
        on_accelerator: Whether the ranks compute on accelerators, whose kernels need other memory
            than a CPU's. If it is not known, they do if the config names one.
    """
    layout = layout or layout_of(config, world_size)
    described = _described(config.model)
    if described is None:
        return _unpredicted(config)
    shape = nearest_buildable(described)
    passes = config.training.num_passes(layout.data_parallel)
    own = -(-config.training.batch_size // layout.data_parallel)
    batch = BatchShape(num_sequences=-(-own // passes), context_length=config.data.context_length)
    if on_accelerator is None:
        on_accelerator = config.parallel.device not in ("auto", "cpu")
    step = dataclasses.replace(batch, accumulation_steps=passes)
    memory = _memory(config, shape, layout, step, world_size, on_accelerator=on_accelerator)
    step_time_s = None
    has_sites = config.parallel.outer.sites > 1
    if calibration is not None and config.parallel.compression == "none" and not has_sites:
        known = calibrations(RecordStore(calibration).read())
        ranks = _calibrated_ranks(known, world_size * at_once, calibration)
        hardware = hardware or str(ranks.topology["hardware"])
        strategy = config.parallel.strategy_on(world_size)
        if needs_mesh(layout) or strategy not in PREDICTED:
            time = layout_step_time(layout, shape, step, ranks, inside_host(known, ranks))
            step_time_s = float(time.total_s.item())
        else:
            step_time_s = _strategy_time_s(config, shape, batch, strategy, passes, ranks)
    per_token = flops_per_token(
        described,
        config.data.context_length,
        activation_checkpointing=config.model.activation_checkpointing,
    )
    predicted = msgspec.structs.replace(
        _unpredicted(config),
        num_parameters=count_parameters(described).total,
        flops_per_step=per_token.model * config.tokens_per_step,
        memory_bytes=memory.total,
        memory=memory,
        kept_in_memory_bytes=_kept_in_memory_bytes(config, shape, batch, world_size),
        step_time_s=step_time_s,
    )
    if config.model.hugging_face is not None:
        return predicted
    corrections = {
        quantity: corrected(quantity, formula, hardware or "", world_size, history)
        for quantity, formula in predicted.formulas.items()
    }
    return msgspec.structs.replace(predicted, corrected=corrections)


def _described(model: ModelConfig) -> ModelShape | None:
    """Returns the shape of the run's model; None of a Hugging Face model that is not known."""
    if model.hugging_face is None:
        return model.shape
    directory = pathlib.Path(model.hugging_face)
    try:
        found = model_of_config(read_config_json(directory), str(directory / CONFIG))
    except UsageError:
        return None  # transformers may know it.
    return None if found.experts is not None else found.shape


def _unpredicted(config: RunConfig) -> Forecast:
    return Forecast(num_steps=config.training.steps, tokens_per_step=config.tokens_per_step)


def _earlier_runs() -> list[HistoryEntry]:
    """Returns the user's history; empty if it is unreadable, which must not prevent a run."""
    try:
        return read_history(history_path())
    except RecordError:
        return []


def _memory(
    config: RunConfig,
    shape: ModelShape,
    layout: ParallelLayout,
    step: BatchShape,
    world_size: int,
    *,
    on_accelerator: bool,
) -> MemoryParts:
    precision = precision_preset(config.training.precision)
    site_ranks = config.parallel.site_ranks(world_size)
    if needs_mesh(layout):
        return trainer_memory(layout, shape, step, precision, on_accelerator=on_accelerator)
    parts = step_memory(
        shape,
        step,
        precision,
        config.parallel.strategy_on(site_ranks),
        site_ranks,
        activation_checkpointing=config.model.activation_checkpointing,
        bucket_size_mb=config.parallel.bucket_size_mb,
        on_accelerator=on_accelerator,
    )["before_step"]
    left_out = compression_bytes(shape, config.parallel.compression, world_size)
    outer = config.parallel.outer
    if outer.sites > 1:
        per_number = outer.settings(config.training.steps).state_bytes(outer.sites)
        left_out += round(per_number * count_parameters(shape).total / site_ranks)
    return dataclasses.replace(parts, buffers=parts.buffers + left_out)


def _kept_in_memory_bytes(
    config: RunConfig, shape: ModelShape, batch: BatchShape, world_size: int
) -> int:
    if not config.checkpoint.memory_every_steps:
        return 0
    precision = precision_preset(config.training.precision)
    whole = step_memory(shape, batch, precision, "none", 1)["before_step"]
    part = -(-(whole.parameters + whole.optimizer_state) // world_size)
    own_and_replica = part * (2 if world_size > 1 else 1)
    return part + 2 * own_and_replica


def require_fit(predicted: Forecast, limit_bytes: int | None) -> None:
    """Raises if the peak memory of a step exceeds a rank's limit, where both are known."""
    need, memory = memory_need(predicted), predicted.memory_bytes
    if limit_bytes is not None and memory is not None and memory > limit_bytes:
        raise UsageError(
            f"{need}, and a rank may use {format_binary_bytes(limit_bytes)}; {MEMORY_REMEDY}"
        )


def memory_need(predicted: Forecast) -> str:
    """Returns the memory of a step, worded as the start of a sentence; empty if not predicted."""
    if predicted.memory is None:
        return ""
    return (
        f"a step needs {format_binary_bytes(predicted.memory.total)} per rank, of which "
        f"activations {format_binary_bytes(predicted.memory.activations)}"
    )


def _calibrated_ranks(
    known: Sequence[Calibration], num_ranks: int, path: pathlib.Path
) -> Calibration:
    """Returns the newest calibration of that many ranks."""
    found = [each for each in known if each.world_size == num_ranks]
    if not found:
        raise UsageError(
            f"{path}: contains no calibration for {num_ranks} ranks; run paceline "
            "calibrate where you will train"
        )
    return found[-1]


def _strategy_time_s(
    config: RunConfig,
    shape: ModelShape,
    batch: BatchShape,
    strategy: StrategyName,
    passes: int,
    calibration: Calibration,
) -> float:
    bucket_size = config.parallel.bucket_size_for(strategy)
    terms = strategy_step_terms(shape, batch, strategy, calibration, bucket_size)
    # Only the last pass communicates and updates; all others only compute.
    alone = strategy_step_terms(shape, batch, "none", calibration, None)
    return terms.total_s + (passes - 1) * (alone.total_s - alone.optimizer_s)


def layout_of(config: RunConfig, world_size: int) -> ParallelLayout:
    """Returns the parallel layout of a run; raises a `UsageError` if it cannot run."""
    layout = _arranged(config, world_size)
    strategy = config.parallel.strategy_on(world_size)
    if not needs_mesh(layout) and strategy in _NEVER_SAVED:
        raise UsageError(
            f"parallel.strategy {strategy} cannot be saved, because torch keeps its optimizer's "
            f"state where no checkpoint reaches it; use {_NEVER_SAVED[strategy]}, which shards the "
            "same state"
        )
    if not needs_mesh(layout) and layout.pipeline_interleave == 1:
        return layout
    if config.model.hugging_face is not None:
        raise UsageError(
            "parallel.tensor, context, pipeline and replicate are for Paceline's own model, not "
            "for model.hugging_face; leave them at 1"
        )
    if layout.tensor > 1 and config.model.compile_blocks:
        # torch 2.13: in backward, a compiled block passes a plain tensor to DTensor's
        # redistribution.
        raise UsageError(
            f"parallel.tensor {layout.tensor} cannot run with model.compile_blocks: torch.compile "
            "does not return the gradients of DTensors; leave one of them out"
        )
    passes = config.training.num_passes(layout.data_parallel)
    work = Work(
        shape=config.model.shape,
        context_length=config.data.context_length,
        num_micro_batches=passes,
    )
    require_runnable(layout, work, "parallel")
    if layout.pipeline > 1 and config.training.batch_size % (layout.data_parallel * passes):
        raise UsageError(
            f"parallel.pipeline {layout.pipeline} needs micro-batches of equal size, and "
            f"training.batch_size {config.training.batch_size} is not divisible by "
            f"{layout.data_parallel} data-parallel ranks with {passes} micro-batches each; change "
            "training.batch_size or training.micro_batch_size"
        )
    return layout


def _arranged(config: RunConfig, world_size: int) -> ParallelLayout:
    parallel = config.parallel
    sizes = {axis: getattr(parallel, axis) for axis in ("tensor", "context", "pipeline")}
    inner = parallel.tensor * parallel.context * parallel.pipeline * parallel.replicate
    left, remainder = divmod(world_size, inner)
    if remainder:
        axes = ", ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise UsageError(
            f"parallel: {axes} and replicate {parallel.replicate} need {inner} ranks, but "
            f"{world_size} is not a multiple of that; start a multiple of {inner}"
        )
    sharding = sharding_of(parallel.strategy)
    is_sharded = sharding != "none"
    return ParallelLayout(
        replicate=parallel.replicate if is_sharded else parallel.replicate * left,
        shard=left if is_sharded else 1,
        **sizes,
        sharding=sharding,
        sequence_parallel=parallel.sequence_parallel,
        pipeline_interleave=parallel.interleave,
        activation_checkpointing=config.model.activation_checkpointing,
    )
