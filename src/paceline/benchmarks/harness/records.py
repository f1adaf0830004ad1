"""Creates records of measurements and predictions, and describes this machine for them."""

import itertools
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from paceline.core.errors import UsageError
from paceline.records import CaseValue, Metric, Record
from paceline.records.environment import Environment, capture_environment
from paceline.records.kinds import PREDICTION, PREDICTS
from paceline.records.schema import Outcome

TORCH_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def resolve_device(name: str) -> torch.device:
    """Returns the device named auto, cpu or cuda; raises if it is missing."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no CUDA device here; use --device cpu")
    return torch.device(name)


def current_environment() -> Environment:
    """Describes this machine, accelerators included."""
    names = ("gloo", "nccl", "mpi", "ucc") if dist.is_available() else ()
    return capture_environment(
        devices=[torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        backends=[name for name in names if dist.is_backend_available(name)],
    )


def peer_links() -> list[str]:
    """Returns the pairs of accelerators with direct access to each other's memory."""
    return [
        f"cuda:{first} <-> cuda:{second} peer access"
        for first, second in itertools.combinations(range(torch.cuda.device_count()), 2)
        if torch.cuda.can_device_access_peer(first, second)
    ]


Numbers = Mapping[str, Metric | float | Sequence[float]]
"""Metrics by name: complete, as a single number, or as samples."""


def measured(
    kind: str,
    case: Mapping[str, CaseValue],
    numbers: Numbers,
    *,
    outcome: Outcome = "ok",
    reason: str | None = None,
    warnings: Sequence[str] = (),
) -> Record:
    """Returns a record of the results of a case on this machine."""
    return Record(
        kind=kind,
        case=dict(case),
        environment=current_environment(),
        metrics={name: _metric(number) for name, number in numbers.items()},
        outcome=outcome,
        reason=reason,
        warnings=tuple(warnings),
    )


def predicted(kind: str, case: Mapping[str, CaseValue], numbers: Numbers) -> Record:
    """Returns a record of the predictions for a case of that kind."""
    return measured(PREDICTION, {PREDICTS: kind, **case}, numbers)


def _metric(number: Metric | float | Sequence[float]) -> Metric:
    if isinstance(number, Metric):
        return number
    return Metric.from_samples(number) if isinstance(number, Sequence) else Metric(value=number)
