"""Predicts a run before any rank starts: parameters, FLOPs, memory and time."""

import dataclasses
import pathlib

from paceline.accounting.flops import flops_per_token
from paceline.accounting.memory.step import MemoryParts, step_memory
from paceline.accounting.parameters import count_parameters
from paceline.core.errors import UsageError
from paceline.core.plan import Estimate
from paceline.core.runnable import needs_mesh
from paceline.core.specs import BatchShape, precision_preset
from paceline.core.strategies import StrategyName
from paceline.core.units import format_binary_bytes
from paceline.predict.calibration import calibrations
from paceline.predict.step import strategy_step_terms
from paceline.records import RecordStore
from paceline.training.config import RunConfig
from paceline.training.layout import layout_of

MEMORY_REMEDY = (
    "lower training.micro_batch_size, set model.activation_checkpointing to full, use "
    "parallel.strategy fully_sharded, or start fewer ranks per host"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast:
    """Predictions for a run, made before it starts."""

    num_parameters: int
    num_steps: int
    flops: float
    """FLOPs of the whole run, forward and backward."""
    tokens: int
    """Tokens that the run trains on."""
    memory: MemoryParts | None
    """Peak memory of a step on the rank that needs most; None on a mesh of several axes, where
    ``paceline plan search`` predicts it."""
    kept_in_memory_bytes: int
    """Host memory per rank for in-memory checkpoints; 0 without them. Covers the rank's own shard
    and a replica of another's, both twice while a save is in flight, and the staging copy."""
    step_time_s: float | None
    """Predicted from a calibration of the machine; None without one and on a mesh of several
    axes."""
    final_loss: Estimate | None = None
    """Final loss, predicted from smaller runs; None without them."""

    @property
    def duration_s(self) -> float | None:
        """Total time of all steps, without evaluations and checkpoints."""
        return None if self.step_time_s is None else self.step_time_s * self.num_steps


def forecast(
    config: RunConfig, world_size: int, calibration: pathlib.Path | None = None, *, at_once: int = 1
) -> Forecast:
    """Predicts a run.

    Args:
        config: The run.
        world_size: Number of ranks.
        calibration: Records of ``paceline calibrate`` for ``world_size * at_once`` ranks.
        at_once: Number of such runs that share the machine.
    """
    shape = config.model.shape
    strategy = config.parallel.strategy_on(world_size)
    layout = layout_of(config, world_size)
    passes = config.training.num_passes(layout.data_parallel)
    own = -(-config.training.batch_size // layout.data_parallel)
    batch = BatchShape(num_sequences=-(-own // passes), context_length=config.data.context_length)
    memory = step_time_s = None
    if not needs_mesh(layout):
        memory = step_memory(
            shape,
            batch,
            precision_preset(config.training.precision),
            strategy,
            world_size,
            activation_checkpointing=config.model.activation_checkpointing,
            bucket_size_mb=config.parallel.bucket_size_mb,
        )["before_step"]
        ranks = world_size * at_once
        step_time_s = _step_time_s(config, batch, strategy, ranks, passes, calibration)
    tokens = config.tokens_per_step * config.training.steps
    per_token = flops_per_token(
        shape,
        config.data.context_length,
        activation_checkpointing=config.model.activation_checkpointing,
    )
    return Forecast(
        num_parameters=count_parameters(shape).total,
        num_steps=config.training.steps,
        flops=per_token.model * tokens,
        tokens=tokens,
        memory=memory,
        kept_in_memory_bytes=_kept_in_memory_bytes(config, batch, world_size),
        step_time_s=step_time_s,
    )


def _kept_in_memory_bytes(config: RunConfig, batch: BatchShape, world_size: int) -> int:
    if not config.checkpoint.memory_every_steps:
        return 0
    precision = precision_preset(config.training.precision)
    whole = step_memory(config.model.shape, batch, precision, "none", 1)["before_step"]
    part = -(-(whole.parameters + whole.optimizer_state) // world_size)
    own_and_replica = part * (2 if world_size > 1 else 1)
    return part + 2 * own_and_replica


def require_fit(predicted: Forecast, limit_bytes: int | None) -> None:
    """Raises if the peak memory of a step exceeds a rank's limit, where both are known."""
    if limit_bytes is None or predicted.memory is None:
        return
    if predicted.memory.total > limit_bytes:
        raise UsageError(
            f"{memory_need(predicted.memory)}, and a rank may use "
            f"{format_binary_bytes(limit_bytes)}; {MEMORY_REMEDY}"
        )


def memory_need(memory: MemoryParts) -> str:
    """Returns the predicted memory of a step, worded as the start of a sentence."""
    return (
        f"a step needs {format_binary_bytes(memory.total)} per rank, of which "
        f"activations {format_binary_bytes(memory.activations)}"
    )


def _step_time_s(
    config: RunConfig,
    batch: BatchShape,
    strategy: StrategyName,
    num_ranks: int,
    passes: int,
    calibration: pathlib.Path | None,
) -> float | None:
    if calibration is None:
        return None
    places = [
        place
        for place in calibrations(RecordStore(calibration).read())
        if place.world_size == num_ranks
    ]
    if not places:
        raise UsageError(
            f"{calibration}: contains no calibration for {num_ranks} ranks; run paceline "
            "calibrate where you will train"
        )
    bucket_size = config.parallel.bucket_size_for(strategy)
    terms = strategy_step_terms(config.model.shape, batch, strategy, places[-1], bucket_size)
    # Only the last pass communicates and updates; all others only compute.
    alone = strategy_step_terms(config.model.shape, batch, "none", places[-1], None)
    return terms.total_s + (passes - 1) * (alone.total_s - alone.optimizer_s)
