"""Records for tables and plots, made without measuring anything."""

from typing import Any

import msgspec

from paceline.records import Metric, Record, capture_environment, find_kind

ENVIRONMENT = capture_environment()


def _record(kind: str, case: dict[str, Any], metrics: dict[str, Metric], outcome: Any) -> Record:
    defaults: dict[str, Any] = dict.fromkeys(find_kind(kind).join_key, "x")
    return Record(
        kind=kind,
        case=defaults | case,
        environment=ENVIRONMENT,
        metrics=metrics if outcome == "ok" else {},
        outcome=outcome,
        reason=None if outcome == "ok" else "a reason",
    )


def prediction_of(measured: Record, metrics: dict[str, Metric]) -> Record:
    """What was predicted of a measured case."""
    return msgspec.structs.replace(
        measured,
        kind="prediction",
        case={"predicts": measured.kind, **measured.case},
        metrics=metrics,
    )


def step_record(
    *, seconds: float = 0.1, outcome: str = "ok", utilization: float | None = None, **case: Any
) -> Record:
    samples = [seconds * factor for factor in (0.9, 1.0, 1.2)]
    metrics = {
        name: Metric.from_samples(samples)
        for name in ("forward_time_s", "backward_time_s", "optimizer_time_s", "step_time_s")
    }
    metrics |= {
        "tokens_per_s": Metric(value=512 / seconds),
        "model_flops_per_s": Metric(value=75e9),
        "memory_after_init_bytes": Metric(value=2**30),
        "peak_before_optimizer_bytes": Metric(value=3 * 2**30),
        "peak_after_optimizer_bytes": Metric(value=2 * 2**30),
    }
    if utilization is not None:
        metrics["model_flops_utilization"] = Metric(value=utilization)
        metrics["model_flops_utilization_causal"] = Metric(value=utilization - 0.015)
    defaults = {
        "model": "small",
        "precision": "float32",
        "warmup": 5,
        "context": 128,
        "batch": 4,
        "phase": "train",
    }
    return _record("step", defaults | case, metrics, outcome)


def data_parallel_record(
    strategy: str, bucket_size_mb: float | str | None, *, exposed_s: float = 0.02, **case: Any
) -> Record:
    metrics = {
        name: Metric.from_samples([seconds * factor for factor in (0.9, 1.0, 1.2)])
        for name, seconds in {
            "forward_time_s": 0.1,
            "backward_time_s": 0.2,
            "exposed_communication_s": exposed_s,
            "optimizer_time_s": 0.03,
            "step_time_s": 0.33 + exposed_s,
            "communication_s": 0.15,
        }.items()
    }
    metrics |= {
        "step_time_ratio": Metric(value=0.9, low=0.85, high=0.95),
        "num_messages": Metric(value=7),
        "gradient_bytes": Metric(value=2**27),
        "peak_before_optimizer_bytes": Metric(value=2**29),
    }
    fields = {"strategy": strategy, "bucket_size_mb": bucket_size_mb, "model": "small"}
    return _record("ddp", fields | case, metrics, "ok")


def data_parallel_prediction(bucket_size_mb: float, exposed_s: float) -> Record:
    measured = data_parallel_record("bucketed", bucket_size_mb)
    metrics = {
        "exposed_communication_s": exposed_s,
        "gradient_bytes": 4e8,
        "latency_s": 1e-4,
        "algorithm_bandwidth_bytes_per_s": 1e10,
    }
    return prediction_of(measured, {name: Metric(value=value) for name, value in metrics.items()})


def attention_record(context: int, head_dim: int = 64, outcome: str = "ok", **case: Any) -> Record:
    metrics = {
        "forward_time_s": Metric.from_samples([1e-9 * context**2]),
        "backward_time_s": Metric.from_samples([2e-9 * context**2]),
        "saved_for_backward_bytes": Metric(value=32 * context**2),
        "peak_bytes": Metric(value=96 * context**2),
    }
    case = {"context": context, "head_dim": head_dim, **case}
    return _record("attention", case, metrics, outcome)


def communication_record(size_bytes: int, world_size: int, **case: Any) -> Record:
    metrics = {
        "time_s": Metric.from_samples([size_bytes / 1e9]),
        "algorithm_bandwidth_bytes_per_s": Metric(value=1e9),
        "bus_bandwidth_bytes_per_s": Metric(value=2e9 * (world_size - 1) / world_size),
    }
    case = {"operation": "all_reduce", "size_bytes": size_bytes, "world_size": world_size, **case}
    return _record("comm", case, metrics, "ok")


def timeline_record(strategy: str, rank: int, *, exposed_s: float) -> Record:
    """A step of 0.1 s of forward, 0.2 of backward, a wait, and 0.02 of the optimizer."""
    samples = {
        "compute_start_s": (0.0, 0.3 + exposed_s),
        "compute_end_s": (0.3, 0.32 + exposed_s),
        "message_start_s": (0.2, 0.28),
        "message_end_s": (0.28, 0.3 + exposed_s),
        "forward_start_s": (0.0,),
        "forward_end_s": (0.1,),
        "backward_start_s": (0.1,),
        "backward_end_s": (0.3 + exposed_s,),
        "optimizer_start_s": (0.3 + exposed_s,),
        "optimizer_end_s": (0.32 + exposed_s,),
        "drawn_step_s": (0.32 + exposed_s,),
        "drawn_exposed_s": (exposed_s,),
        "step_time_s": (0.32 + exposed_s, 0.5),
        "exposed_communication_s": (exposed_s,),
    }
    case = {"strategy": strategy, "bucket_size_mb": None, "model": "small", "rank": rank}
    metrics = {name: Metric.from_samples(values) for name, values in samples.items()}
    return _record("timeline", case, metrics, "ok")


def timeline_prediction(strategy: str, exposed_s: float) -> Record:
    measured = timeline_record(strategy, 0, exposed_s=exposed_s)
    kept = ("message_start_s", "message_end_s", "exposed_communication_s")
    return prediction_of(measured, {name: measured.metrics[name] for name in kept})


def optimizer_record(
    strategy: str, sizes_mib: tuple[int, ...], *, is_prediction: bool = False, **case: Any
) -> Record:
    """A strategy with the same memory at all three instants."""
    parts = ("parameters", "gradients", "optimizer_state", "buffers", "activations")
    metrics = {}
    for instant in ("after_init", "before_step", "after_step"):
        for part, size in zip(parts, sizes_mib, strict=True):
            metrics[f"{instant}_{part}_bytes"] = Metric(value=size * 2**20)
        metrics[f"peak_{instant}_bytes"] = Metric(value=sum(sizes_mib) * 2**20)
    times = {
        "step_time_s": Metric.from_samples([0.2, 0.3, 0.4]),
        "optimizer_time_s": Metric.from_samples([0.02]),
    }
    fields = {"strategy": strategy, "bucket_size_mb": None, "model": "small", **case}
    measured = _record("optimizer", fields, metrics | times, "ok")
    return prediction_of(measured, metrics) if is_prediction else measured


def memory_record(**case: Any) -> Record:
    categories = ("parameters", "optimizer_state", "other", "gradients", "activations", "temporary")
    metrics = {
        "peak_bytes": Metric(value=6 * 2**20),
        "time_s": Metric.from_samples([0.0, 0.1, 0.2]),
        "forward_end_s": Metric(value=0.1),
        "backward_end_s": Metric(value=0.2),
    }
    for category in categories:
        metrics[f"{category}_bytes"] = Metric.from_samples([2**20, 2**20, 0])
        metrics[f"{category}_at_peak_bytes"] = Metric(value=2**20)
    return _record("memory_timeline", {"model": "small", **case}, metrics, "ok")
