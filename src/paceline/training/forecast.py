"""Predicts a run before any rank starts: parameters, FLOPs, memory and time."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

from paceline.accounting.flops import flops_per_token
from paceline.accounting.memory.step import MemoryParts, step_memory
from paceline.accounting.parameters import count_parameters
from paceline.core.errors import RecordError, UsageError
from paceline.core.plan import Estimate, ParallelLayout
from paceline.core.runnable import needs_mesh
from paceline.core.specs import BatchShape, precision_preset
from paceline.core.strategies import StrategyName
from paceline.core.units import format_binary_bytes
from paceline.predict.calibration import Calibration, calibrations, inside_host
from paceline.predict.history import HistoryEntry, Quantity, corrected, history_path, read_history
from paceline.predict.layout_step import layout_step_time
from paceline.predict.step import PREDICTED, strategy_step_terms
from paceline.predict.trainer_memory import TrainerStep, trainer_memory
from paceline.records import RecordStore
from paceline.training.config import RunConfig
from paceline.training.layout import layout_of

MEMORY_REMEDY = (
    "lower training.micro_batch_size, set model.activation_checkpointing to full, use "
    "parallel.strategy fully_sharded, or start fewer ranks per host"
)
_SAME_COLLECTIVES: dict[StrategyName, StrategyName] = {"torch_zero": "sharded_optimizer"}
"""Strategies that are predicted as another one, which sends the same bytes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast:
    """Predictions for a run, made before it starts."""

    num_parameters: int
    num_steps: int
    flops: float
    """FLOPs of the whole run, forward and backward."""
    tokens: int
    """Tokens that the run trains on."""
    memory: MemoryParts
    """Peak memory of a step on the rank that needs most."""
    kept_in_memory_bytes: int
    """Host memory per rank for in-memory checkpoints; 0 without them. Covers the rank's own shard
    and a replica of another's, both twice while a save is in flight, and the staging copy."""
    step_time_s: float | None
    """Predicted from a calibration of the machine; None without one."""
    corrected: Mapping[Quantity, Estimate]
    """Step time and memory, corrected by earlier runs on the same hardware, with intervals."""
    final_loss: Estimate | None = None
    """Final loss, predicted from smaller runs; None without them."""

    @property
    def formulas(self) -> dict[Quantity, float]:
        """Uncorrected predictions."""
        return _formulas(self.step_time_s, self.memory)

    @property
    def duration_s(self) -> float | None:
        """Total time of all steps, without evaluations and checkpoints."""
        return None if self.step_time_s is None else self.step_time_s * self.num_steps


def forecast(
    config: RunConfig,
    world_size: int,
    calibration: pathlib.Path | None = None,
    *,
    at_once: int = 1,
    history: Sequence[HistoryEntry] = (),
    hardware: str | None = None,
) -> Forecast:
    """Predicts a run.

    Args:
        config: The run.
        world_size: Number of ranks.
        calibration: Records of ``paceline calibrate`` for ``world_size * at_once`` ranks.
        at_once: Number of such runs that share the machine.
        history: Earlier predictions and measurements.
        hardware: The machine, to select from the history; by default that of the calibration.
    """
    shape = config.model.shape
    layout = layout_of(config, world_size)
    passes = config.training.num_passes(layout.data_parallel)
    own = -(-config.training.batch_size // layout.data_parallel)
    batch = BatchShape(num_sequences=-(-own // passes), context_length=config.data.context_length)
    step = TrainerStep(
        shape=shape,
        context_length=batch.context_length,
        micro_batch=batch.num_sequences,
        num_micro_batches=passes,
        precision=precision_preset(config.training.precision),
    )
    memory = _memory(config, layout, step, batch, world_size)
    step_time_s = None
    if calibration is not None:
        known = calibrations(RecordStore(calibration).read())
        ranks = _calibrated_ranks(known, world_size * at_once, calibration)
        hardware = hardware or str(ranks.topology["hardware"])
        strategy = config.parallel.strategy_on(world_size)
        strategy = _SAME_COLLECTIVES.get(strategy, strategy)
        if needs_mesh(layout) or strategy not in PREDICTED:
            time = layout_step_time(layout, step, ranks, inside_host(known, ranks))
            step_time_s = float(time.total_s.item())
        else:
            step_time_s = _strategy_time_s(config, batch, strategy, passes, ranks)
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
        corrected={
            quantity: corrected(quantity, formula, hardware or "", world_size, history)
            for quantity, formula in _formulas(step_time_s, memory).items()
        },
    )


def earlier_runs() -> list[HistoryEntry]:
    """Returns the user's history; empty if it is unreadable, which must not prevent a run."""
    try:
        return read_history(history_path())
    except RecordError:
        return []


def _formulas(step_time_s: float | None, memory: MemoryParts) -> dict[Quantity, float]:
    known: dict[Quantity, float] = {} if step_time_s is None else {"step_time_s": step_time_s}
    return {**known, "memory_bytes": float(memory.total)}


def _memory(
    config: RunConfig, layout: ParallelLayout, step: TrainerStep, batch: BatchShape, world_size: int
) -> MemoryParts:
    if needs_mesh(layout):
        return trainer_memory(layout, step)
    return step_memory(
        step.shape,
        batch,
        step.precision,
        config.parallel.strategy_on(world_size),
        world_size,
        activation_checkpointing=config.model.activation_checkpointing,
        bucket_size_mb=config.parallel.bucket_size_mb,
    )["before_step"]


def _kept_in_memory_bytes(config: RunConfig, batch: BatchShape, world_size: int) -> int:
    if not config.checkpoint.memory_every_steps:
        return 0
    precision = precision_preset(config.training.precision)
    whole = step_memory(config.model.shape, batch, precision, "none", 1)["before_step"]
    part = -(-(whole.parameters + whole.optimizer_state) // world_size)
    own_and_replica = part * (2 if world_size > 1 else 1)
    return part + 2 * own_and_replica


def require_fit(predicted: Forecast, limit_bytes: int | None) -> None:
    """Raises if the peak memory of a step exceeds a rank's limit, if that is known."""
    if limit_bytes is not None and predicted.memory.total > limit_bytes:
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
    batch: BatchShape,
    strategy: StrategyName,
    passes: int,
    calibration: Calibration,
) -> float:
    bucket_size = config.parallel.bucket_size_for(strategy)
    terms = strategy_step_terms(config.model.shape, batch, strategy, calibration, bucket_size)
    # Only the last pass communicates and updates; all others only compute.
    alone = strategy_step_terms(config.model.shape, batch, "none", calibration, None)
    return terms.total_s + (passes - 1) * (alone.total_s - alone.optimizer_s)
