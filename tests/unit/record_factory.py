"""Synthetic records for tests of tables, plots and reports."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from paceline.records import Environment, Metric, Record, capture_environment, find_kind
from paceline.traces.analysis import step_subject

ENVIRONMENT = capture_environment()
Numbers = Mapping[str, float | Sequence[float]]
"""Metrics by name; each is one number or a sequence of samples."""


def _metrics(numbers: Numbers) -> dict[str, Metric]:
    return {
        name: Metric.from_samples(list(number))
        if isinstance(number, Sequence)
        else Metric(value=number)
        for name, number in numbers.items()
    }


def make_record(
    kind: str,
    numbers: Numbers,
    outcome: Any = "ok",
    environment: Environment = ENVIRONMENT,
    **case: Any,
) -> Record:
    """Returns a record; fields of its join key that `case` does not set are "x"."""
    return Record(
        kind=kind,
        case=dict.fromkeys(find_kind(case.get("predicts", kind)).join_key, "x") | case,
        environment=environment,
        metrics=_metrics(numbers) if outcome == "ok" else {},
        outcome=outcome,
        reason=None if outcome == "ok" else "a reason",
    )


def prediction_of(measured: Record, numbers: Numbers) -> Record:
    """Returns a prediction for the case of a measured record."""
    case = {"predicts": measured.kind, **measured.case}
    return msgspec.structs.replace(
        measured, kind="prediction", case=case, metrics=_metrics(numbers)
    )


def _samples(seconds: float) -> list[float]:
    return [seconds * factor for factor in (0.9, 1.0, 1.2)]


def step_record(*, seconds: float = 0.1, utilization: float | None = None, **case: Any) -> Record:
    phases = ("forward", "backward", "optimizer", "step")
    numbers: dict[str, float | Sequence[float]] = {
        **{f"{phase}_time_s": _samples(seconds) for phase in phases},
        "tokens_per_s": 512 / seconds,
        "model_flops_per_s": 75e9,
        "memory_after_init_bytes": 2**30,
        "peak_before_optimizer_bytes": 3 * 2**30,
        "peak_after_optimizer_bytes": 2 * 2**30,
    }
    if utilization is not None:
        numbers["model_flops_utilization"] = utilization
        numbers["model_flops_utilization_causal"] = utilization - 0.015
    usual = {"model": "small", "precision": "float32", "warmup": 5, "phase": "train"}
    return make_record("step", numbers, **{**usual, "context": 128, "batch": 4, **case})


def data_parallel_record(
    strategy: str, bucket_size_mb: float | str | None, *, exposed_s: float = 0.02
) -> Record:
    numbers = {
        "forward_time_s": 0.1,
        "backward_time_s": 0.2,
        "exposed_communication_s": exposed_s,
        "optimizer_time_s": 0.03,
    }
    factors = (0.8, 0.9, 1.0, 1.2, 1.6)
    samples = {name: [each * factor for factor in factors] for name, each in numbers.items()}
    return make_record("ddp", samples, strategy=strategy, bucket_size_mb=bucket_size_mb)


def attention_record(context: int, head_dim: int = 64, **case: Any) -> Record:
    numbers = {
        "forward_time_s": [1e-9 * context**2],
        "backward_time_s": [2e-9 * context**2],
        "saved_for_backward_bytes": 32 * context**2,
        "peak_bytes": 96 * context**2,
    }
    return make_record("attention", numbers, context=context, head_dim=head_dim, **case)


def kernel_record(registers: float = 99, *, outcome: Any = "ok", **changes: Any) -> Record:
    """Returns a Triton kernel with a ceiling of registers / 200; `changes` override any of it."""
    numbers = {
        "registers": registers,
        "spill_bytes": 0,
        "shared_bytes": 48 * 1024,
        "occupancy": 0.125,
    }
    numbers |= {"matrix_instructions": 8, "worst_intensity": 30, "best_intensity": 1500}
    numbers |= {"worst_ceiling": registers / 200}
    numbers |= {name: changes.pop(name) for name in numbers.keys() & changes.keys()}
    case = {"kernel": "forward", "architecture": "sm90", "head_dim": 64, "num_warps": 8}
    case |= {"block_queries": 128, "block_keys": 64, "num_stages": 3}
    return make_record("kernel", numbers, outcome, **case | changes)


def communication_record(size_bytes: int, world_size: int, **case: Any) -> Record:
    case = {"operation": "all_reduce", "size_bytes": size_bytes, "world_size": world_size, **case}
    return make_record("comm", {"algorithm_bandwidth_bytes_per_s": 1e9}, **case)


def timeline_record(strategy: str, rank: int, *, exposed_s: float) -> Record:
    """Returns a step: 0.1 s forward, 0.2 s backward, `exposed_s` of waiting, 0.02 s optimizer."""
    end = 0.3 + exposed_s
    spans = {
        "compute": ((0.0, 0.3), (end, end + 0.02)),
        "message": ((0.2, 0.28), (0.28, end)),
        "forward": ((0.0, 0.1),),
        "backward": ((0.1, end),),
        "optimizer": ((end, end + 0.02),),
    }
    numbers: dict[str, float | Sequence[float]] = {
        "drawn_step_s": end + 0.02,
        "drawn_exposed_s": exposed_s,
    }
    for name, pairs in spans.items():
        numbers[f"{name}_start_s"], numbers[f"{name}_end_s"] = zip(*pairs, strict=True)
    return make_record("timeline", numbers, strategy=strategy, bucket_size_mb=None, rank=rank)


def optimizer_record(
    strategy: str, sizes_mib: tuple[int, ...], *, is_prediction: bool = False, **case: Any
) -> Record:
    """Returns a strategy with the same memory at all three instants."""
    parts = ("parameters", "gradients", "optimizer_state", "buffers", "activations")
    numbers: dict[str, float | Sequence[float]] = {}
    for instant in ("after_init", "before_step", "after_step"):
        for part, size in zip(parts, sizes_mib, strict=True):
            numbers[f"{instant}_{part}_bytes"] = size * 2**20
        numbers[f"peak_{instant}_bytes"] = sum(sizes_mib) * 2**20
    times = {"step_time_s": [0.2, 0.3, 0.4], "optimizer_time_s": [0.02]}
    fields = {"strategy": strategy, "bucket_size_mb": None, **case}
    measured = make_record("optimizer", {**numbers, **times}, **fields)
    return prediction_of(measured, numbers) if is_prediction else measured


MEASURED_MEMORY = [
    optimizer_record("torch_ddp", (40, 40, 80, 5, 35)),
    optimizer_record("zero1", (40, 40, 40, 5, 35)),
]
PREDICTED_MEMORY = optimizer_record("zero1", (40, 40, 40, 5, 27), is_prediction=True)


def memory_record(**case: Any) -> Record:
    numbers: dict[str, float | Sequence[float]] = {
        "peak_bytes": 6 * 2**20,
        "time_s": [0.0, 0.1, 0.2],
        "forward_end_s": 0.1,
        "backward_end_s": 0.2,
    }
    parts = ("parameters", "optimizer_state", "other", "gradients", "activations", "temporary")
    for part in parts:
        numbers[f"{part}_bytes"] = [2**20, 2**20, 0]
        numbers[f"{part}_at_peak_bytes"] = 2**20
    return make_record("memory_timeline", numbers, **{"model": "small", **case})


Ranges = Mapping[str, Mapping[tuple[str, str], tuple[float, float, float]]]
"""Seconds, calls and FLOPs by range, kind of work and operator."""

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
    """Returns rows as a profile writes them: by kind, by operator, and for the whole step."""
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
    """Returns the records that answers use, as a profile of a one-second step writes them."""
    environment = profile_environment(machine, time)
    phase = "train" if "backward" in ranges else "forward"
    memory = memory_record(**{**MODEL, "hardware": machine, "phase": phase, **case})
    subject = step_subject(memory.case)
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


def pipeline_record(layout: str, **case: Any) -> Record:
    """Returns a pipeline of two ranks and two micro-batches."""
    lanes: dict[str, list[float]] = {}
    for phase, starts in {
        "forward": (0.0, 0.1, 0.1, 0.4),
        "backward": (0.4, 0.6, 0.2, 0.5),
    }.items():
        lanes |= {
            f"{phase}_start_s": list(starts),
            f"{phase}_end_s": [start + 0.1 for start in starts],
            f"{phase}_rank": [0.0, 0.0, 1.0, 1.0],
            f"{phase}_stage": [0.0, 0.0, 1.0, 1.0],
            f"{phase}_micro_batch": [0.0, 1.0, 0.0, 1.0],
        }
    idle = {
        "idle": [0.7, 0.8],
        "bubble": [0.65],
        "imbalance": [0.1],
        "order_bubble": [0.5],
        "messages": [0.15],
    }
    numbers = {**lanes, **idle, "duration_s": [0.7], "work_s": [0.4]}
    return make_record("pipeline", numbers, layout=layout, **case)
