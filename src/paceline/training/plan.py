"""Turns a plan of `paceline plan step` or `plan search` into settings of a run config."""

import dataclasses
import math
import os
import pathlib
from typing import Any

import msgspec

from paceline.core.errors import RecordError, UsageError
from paceline.core.plan import Plan, Sharding
from paceline.core.presets import model_preset
from paceline.core.runnable import Work, require_runnable
from paceline.core.specs import require_buildable
from paceline.core.strategies import StrategyName
from paceline.predict.backtest import STEP
from paceline.records import Record, RecordStore, decode_plan
from paceline.records.kinds import PREDICTION
from paceline.records.store import UNDECODABLE
from paceline.training.config import dimensions
from paceline.training.toml_config import Settings

_STRATEGIES: dict[Sharding, StrategyName] = {
    "none": "ddp",
    "optimizer": "zero1",
    "gradients": "zero2",
    "parameters": "fsdp",
}
"""Strategy that implements each kind of sharding."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """The settings of a run that follows a plan."""

    settings: Settings
    """Values of config keys, by section."""
    world_size: int
    step_time_s: float


def read_plan(path: str | os.PathLike[str]) -> PlanSettings:
    """Reads a searched plan, or the prediction with the most tokens per second.

    Args:
        path: A plan.json of ``paceline plan search --out``, or a file of records as printed by
            ``paceline plan step --json``.
    """
    searched = _searched(pathlib.Path(path))
    if searched is not None:
        return _searched_settings(searched, os.fspath(path))
    predictions = [record for record in RecordStore(path).read() if _is_step(record)]
    if not predictions:
        raise UsageError(
            f"{os.fspath(path)}: contains no predicted step; paceline plan step --json writes one"
        )
    return _predicted_settings(max(predictions, key=_tokens_per_second))


def _searched(path: pathlib.Path) -> Plan | None:
    """Returns the plan in a file, or None if it contains something else, such as records."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RecordError(
            f"{path}: {error.strerror}; paceline plan search --runnable --out writes a plan"
        ) from error
    try:
        raw = msgspec.json.decode(data)
    except UNDECODABLE:
        return None
    is_plan = isinstance(raw, dict) and "layout" in raw
    return decode_plan(data, str(path)) if is_plan else None


def _searched_settings(plan: Plan, where: str) -> PlanSettings:
    layout, batch = plan.layout, plan.batch
    if plan.experts is not None:
        raise UsageError(
            f"{where}: plans a mixture of experts, which paceline train does not support; use the "
            "files for Megatron-LM and torchtitan next to it, or search a dense model with "
            "--runnable"
        )
    require_buildable(plan.model)
    work = Work(
        shape=plan.model,
        context_length=batch.context_length,
        num_micro_batches=batch.accumulation_steps,
    )
    require_runnable(layout, work, where)
    if STEP not in plan.predictions:
        raise UsageError(f"{where}: no prediction of {STEP} in it; paceline plan search writes one")
    parallel: dict[str, Any] = {
        "tensor": layout.tensor,
        "sequence_parallel": layout.sequence_parallel,
        "context": layout.context,
        "pipeline": layout.pipeline,
        "interleave": layout.pipeline_interleave,
        # The remaining ranks shard the states.
        "replicate": layout.replicate if layout.sharding != "none" else 1,
    }
    if layout.world_size > 1:
        parallel["strategy"] = _STRATEGIES[layout.sharding]
    if layout.bucket_size_mb is not None:
        parallel["bucket_size_mb"] = layout.bucket_size_mb
    sequences = batch.num_sequences * batch.accumulation_steps
    settings = {
        "model": {
            **dimensions(plan.model),
            "num_kv_heads": plan.model.key_value_heads,
            "head_dim": plan.model.head_width,
            "activation_checkpointing": layout.activation_checkpointing,
        },
        "data": {"context_length": batch.context_length},
        "training": {
            "micro_batch_size": batch.num_sequences,
            "batch_size": sequences * layout.data_parallel,
            "precision": "float32" if plan.precision.compute == "float32" else "bfloat16",
        },
        "parallel": parallel,
    }
    step_time_s = plan.predictions[STEP].value
    return PlanSettings(settings=settings, world_size=layout.world_size, step_time_s=step_time_s)


def _is_step(record: Record) -> bool:
    return record.kind == PREDICTION and STEP in record.metrics and "strategy" in record.case


def _tokens_per_second(record: Record) -> float:
    tokens = math.prod(_integer(record, field) for field in ("batch", "context", "world_size"))
    return tokens / record.metrics[STEP].value


def _predicted_settings(record: Record) -> PlanSettings:
    case = record.case
    model_preset(str(case["model"]))  # Raises for a model that no config can name.
    batch, world_size = _integer(record, "batch"), _integer(record, "world_size")
    parallel: dict[str, Any] = {}
    if world_size > 1:
        parallel["strategy"] = str(case["strategy"])
    if case.get("bucket_size_mb") is not None:
        parallel["bucket_size_mb"] = case["bucket_size_mb"]
    settings: dict[str, dict[str, Any]] = {
        "model": {"preset": str(case["model"])},
        "data": {"context_length": _integer(record, "context")},
        "training": {"micro_batch_size": batch, "batch_size": batch * world_size},
        "parallel": parallel,
    }
    return PlanSettings(
        settings=settings, world_size=world_size, step_time_s=record.metrics[STEP].value
    )


def _integer(record: Record, field: str) -> int:
    return int(str(record.case[field]))
