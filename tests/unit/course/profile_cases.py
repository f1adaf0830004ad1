"""Records of profiles, as one run on one machine writes them."""

from collections.abc import Mapping
from typing import Any

import msgspec

from paceline.records import Environment, Record
from paceline.reports.evidence.profile_runs import subject_of
from tests.unit.course.report_cases import make_record
from tests.unit.record_factory import ENVIRONMENT, memory_record

Ranges = Mapping[str, Mapping[tuple[str, str], tuple[float, float, float]]]
"""Seconds, calls and operations by range, kind of work and operator."""

EARLY, LATE = "2026-01-01T10:00:00+00:00", "2026-01-02T10:00:00+00:00"
SIZES = ("vocab_size", "d_model", "d_ff", "num_layers", "num_heads", "num_kv_heads", "head_dim")
MODEL: dict[str, Any] = {
    **dict(zip(SIZES, (100, 128, 256, 2, 2, 2, 64), strict=True)),
    "model": "tiny",
    "tied_embeddings": False,
    "batch": 4,
    "context": 256,
    "precision": "float32",
    "attention": "naive",
    "compile": "none",
    "device": "cpu",
    "hardware": "laptop",
    "threads": 2,
}
FORWARD = {("matmul", "aten::mm"): (0.6, 15, 2e9), ("elementwise", "aten::mul"): (0.4, 9, 0)}
BACKWARD = {("matmul", "aten::mm"): (1.2, 30, 4e9), ("elementwise", "aten::mul"): (0.8, 9, 0)}
OPTIMIZER = {("elementwise", "aten::add_"): (1.0, 1, 0)}
TRAIN: Ranges = {"forward": FORWARD, "backward": BACKWARD, "optimizer": OPTIMIZER}


def profile_environment(machine: str = "laptop", time: str = EARLY) -> Environment:
    return msgspec.structs.replace(ENVIRONMENT, processor=machine, time=time)


def profile_record(
    kind: str, case: dict[str, Any], environment: Environment, metrics: Mapping[str, float]
) -> Record:
    return msgspec.structs.replace(make_record(kind, metrics, **case), environment=environment)


def operator_rows(ranges: Ranges, subject: str, environment: Environment) -> list[Record]:
    """Rows as a profile writes them: by kind, by operator, and for the whole step."""
    whole: dict[tuple[str, str], tuple[float, float, float]] = {}
    for name in ("forward", "backward", "optimizer"):
        for key, row in ranges.get(name, {}).items():
            before = whole.get(key, (0.0, 0.0, 0.0))
            whole[key] = (before[0] + row[0], before[1] + row[1], before[2] + row[2])
    records = []
    for name, rows in {**ranges, "whole step": whole}.items():
        total = sum(row[0] for row in rows.values())
        kinds: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
        for (work, operator), row in rows.items():
            kinds.setdefault((work, "all"), []).append(row)
            kinds[work, operator] = [row]
        for (work, operator), summed in kinds.items():
            own, calls, flops = (sum(row[place] for row in summed) for place in range(3))
            share = own / total if total else 0.0
            metrics = {"own_time_s": own, "share": share, "num_calls": calls, "flops": flops}
            case = {"subject": subject, "range": name, "work": work, "operator": operator}
            records.append(profile_record("operator", case, environment, metrics))
    return records


def profile(
    ranges: Ranges,
    *,
    machine: str = "laptop",
    time: str = EARLY,
    expected: Mapping[str, float] | None = None,
    step_s: float = 1.0,
    **case: Any,
) -> list[Record]:
    """All records of a run that the answers use, as a profile writes them."""
    environment = profile_environment(machine, time)
    phase = "train" if "backward" in ranges else "forward"
    memory = memory_record(**{**MODEL, "hardware": machine, "phase": phase, **case})
    subject = subject_of(memory)
    matmuls = {"predicts": "operator", "subject": subject, "work": "matmul", "operator": "all"}
    predictions = [
        profile_record("prediction", {**matmuls, "range": name}, environment, {"flops": flops})
        for name, flops in (expected or {}).items()
    ]
    trace = {"subject": subject, "rank": 0, "label": ""}
    return [
        profile_record("trace_step", trace, environment, {"step_time_s": step_s}),
        *operator_rows(ranges, subject, environment),
        *predictions,
        msgspec.structs.replace(memory, environment=environment),
    ]
