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
MODEL: dict[str, Any] = dict(zip(SIZES, (100, 128, 256, 2, 2, 2, 64), strict=True))
MODEL |= {"model": "tiny", "tied_embeddings": False, "batch": 4, "context": 256}
MODEL |= {"precision": "float32", "attention": "naive", "compile": "none"}
MODEL |= {"device": "cpu", "hardware": "laptop", "threads": 2}
FORWARD = {("matmul", "aten::mm"): (0.6, 15, 2e9), ("elementwise", "aten::mul"): (0.4, 9, 0)}
BACKWARD = {("matmul", "aten::mm"): (1.2, 30, 4e9), ("elementwise", "aten::mul"): (0.8, 9, 0)}
OPTIMIZER = {("elementwise", "aten::add_"): (1.0, 1, 0)}
TRAIN: Ranges = {"forward": FORWARD, "backward": BACKWARD, "optimizer": OPTIMIZER}


def profile_environment(machine: str = "laptop", time: str = EARLY) -> Environment:
    return msgspec.structs.replace(ENVIRONMENT, processor=machine, time=time)


def operator_rows(ranges: Ranges, subject: str, environment: Environment) -> list[Record]:
    """Rows as a profile writes them: by kind, by operator, and for the whole step."""
    phases = [(key, row) for name in TRAIN for key, row in ranges.get(name, {}).items()]
    by_range = {name: list(rows.items()) for name, rows in ranges.items()}
    records = []
    for name, rows in {**by_range, "whole step": phases}.items():
        total = sum(row[0] for _, row in rows)
        kinds: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
        for (work, operator), row in rows:
            kinds.setdefault((work, "all"), []).append(row)
            kinds.setdefault((work, operator), []).append(row)
        for (work, operator), summed in kinds.items():
            own, calls, flops = map(sum, zip(*summed, strict=True))
            metrics = {"own_time_s": own, "share": own / total if total else 0.0}
            metrics |= {"num_calls": calls, "flops": flops}
            case = {"subject": subject, "range": name, "work": work, "operator": operator}
            records.append(make_record("operator", metrics, environment=environment, **case))
    return records


def profile(
    ranges: Ranges,
    *,
    machine: str = "laptop",
    time: str = EARLY,
    expected: Mapping[str, float] | None = None,
    **case: Any,
) -> list[Record]:
    """All records of a run that the answers use, as a profile of a second's step writes them."""
    environment = profile_environment(machine, time)
    phase = "train" if "backward" in ranges else "forward"
    memory = memory_record(**{**MODEL, "hardware": machine, "phase": phase, **case})
    subject = subject_of(memory)
    matmuls = {"predicts": "operator", "subject": subject, "work": "matmul", "operator": "all"}
    trace = {"subject": subject, "rank": 0, "label": "", "environment": environment}
    return [
        make_record("trace_step", {"step_time_s": 1.0}, **trace),
        *operator_rows(ranges, subject, environment),
        *(
            make_record(
                "prediction", {"flops": flops}, environment=environment, range=name, **matmuls
            )
            for name, flops in (expected or {}).items()
        ),
        msgspec.structs.replace(memory, environment=environment),
    ]
