"""A plan becomes a config: what `paceline plan step` has predicted is what is trained."""

import dataclasses
import math
import os

from paceline.core.errors import UsageError
from paceline.core.presets import model_preset
from paceline.prediction.records import STEP
from paceline.records import Record, RecordStore
from paceline.records.kinds import PREDICTION


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A predicted step, as a run takes it over."""

    changes: tuple[str, ...]
    """What it says of a run, as ``--set`` would."""
    world_size: int
    step_time_s: float


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Reads predictions, and takes the one that trains on most tokens per second.

    Args:
        path: A file of records, such as ``paceline plan step --json`` prints.
    """
    predictions = [record for record in RecordStore(path).read() if _is_step(record)]
    if not predictions:
        raise UsageError(
            f"{os.fspath(path)}: no predicted step in it; paceline plan step --json makes one"
        )
    return _plan(max(predictions, key=_tokens_per_second))


def _is_step(record: Record) -> bool:
    return record.kind == PREDICTION and STEP in record.metrics and "strategy" in record.case


def _tokens_per_second(record: Record) -> float:
    tokens = math.prod(_integer(record, field) for field in ("batch", "context", "world_size"))
    return tokens / record.metrics[STEP].value


def _plan(record: Record) -> Plan:
    case = record.case
    model_preset(str(case["model"]))  # Refuses what no config could name.
    batch, world_size = _integer(record, "batch"), _integer(record, "world_size")
    changes = [
        f'model.preset="{case["model"]}"',
        f"data.context_length={_integer(record, 'context')}",
        f"training.micro_batch_size={batch}",
        f"training.batch_size={batch * world_size}",
    ]
    if world_size > 1:
        changes.append(f'parallel.strategy="{case["strategy"]}"')
    if case.get("bucket_size_mb") is not None:
        changes.append(f"parallel.bucket_size_mb={case['bucket_size_mb']}")
    return Plan(
        changes=tuple(changes), world_size=world_size, step_time_s=record.metrics[STEP].value
    )


def _integer(record: Record, field: str) -> int:
    return int(str(record.case[field]))
