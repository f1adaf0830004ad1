"""The columns of tables, by kind of record: which metrics they show, and how."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal

from paceline.core.units import MB, format_binary_bytes, format_decimal
from paceline.records import Metric

View = Literal["time", "memory"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Column:
    """One column: the metrics that it joins, and how."""

    header: str
    metrics: tuple[str, ...]
    format: Callable[[Sequence[Metric]], str]
    always: bool = False
    """Shown even where no record has a value."""


def _milliseconds(metrics: Sequence[Metric]) -> str:
    (metric,) = metrics
    # One sample has no spread, and a spread of zero would claim that it was exact.
    known = metric.std is not None and len(metric.samples) > 1
    spread = f" ± {three_digits((metric.std or 0.0) * 1e3)}" if known else ""
    return f"{three_digits(metric.value * 1e3)}{spread}"


def three_digits(value: float) -> str:
    """Writes a number with three digits, all before the point if it has as many there."""
    digits = 2 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{max(0, min(digits, 4))}f}"


def _largest_bytes(metrics: Sequence[Metric]) -> str:
    return format_binary_bytes(max(metric.value for metric in metrics))


def _percentages(metrics: Sequence[Metric]) -> str:
    return " / ".join(f"{metric.value:.1%}" for metric in metrics)


def _ratio(metrics: Sequence[Metric]) -> str:
    (metric,) = metrics
    return _with_interval(metric, lambda value: f"{value:.3f}")


def _with_interval(metric: Metric, write: Callable[[float], str]) -> str:
    if metric.low is None or metric.high is None:
        return write(metric.value)
    return f"{write(metric.value)} ({write(metric.low)} to {write(metric.high)})"


def _rate_column(header: str, metric: str) -> Column:
    return Column(
        header=header,
        metrics=(metric,),
        format=lambda metrics: format_decimal(metrics[0].value, "B/s"),
    )


def _flops_column(metric: str) -> Column:
    return Column(
        header="FLOP/s",
        metrics=(metric,),
        format=lambda metrics: format_decimal(metrics[0].value, ""),
    )


def _time_column(name: str) -> Column:
    return Column(header=f"{name} (ms)", metrics=(f"{name}_time_s",), format=_milliseconds)


def _number_column(header: str, metric: str, digits: str, *, unit: str = "") -> Column:
    return Column(
        header=header,
        metrics=(metric,),
        format=lambda metrics: f"{metrics[0].value:{digits}}{unit}",
    )


def _sum_column(header: str, *metrics: str) -> Column:
    return Column(
        header=f"{header} (ms)",
        metrics=metrics,
        format=lambda present: three_digits(sum(metric.value for metric in present) * 1e3),
    )


def _bytes_column(header: str, *metrics: str) -> Column:
    return Column(header=header, metrics=metrics, format=_largest_bytes)


# Where a step went: the first columns add up to it.
_STEP_PARTS = (
    *(
        Column(header=f"{header} (ms)", metrics=(metric,), format=_milliseconds)
        for header, metric in (
            ("compute", "compute_s"),
            ("contention", "contention_s"),
            ("exposed", "exposed_communication_s"),
            ("idle", "idle_s"),
            ("step", "step_time_s"),
            ("hidden", "overlapped_communication_s"),
            ("exposed, as reported", "reported_exposed_s"),
        )
    ),
)

_INSTANTS = {
    "after_init": "after init",
    "before_step": "before step",
    "after_step": "after step",
}
_PEAKS = tuple(
    _bytes_column(header, f"peak_{instant}_bytes") for instant, header in _INSTANTS.items()
)

_COLLECTIVE_FIT = (
    Column(
        header="latency (ms)",
        metrics=("latency_s",),
        format=lambda metrics: _with_interval(metrics[0], lambda value: three_digits(value * 1e3)),
    ),
    Column(
        header="bandwidth",
        metrics=("algorithm_bandwidth_bytes_per_s",),
        format=lambda metrics: _with_interval(
            metrics[0], lambda value: format_decimal(value, "B/s")
        ),
    ),
    Column(header="largest error", metrics=("max_relative_error",), format=_percentages),
)

COLUMNS: dict[tuple[str, View], tuple[Column, ...]] = {
    ("step", "time"): (
        *(_time_column(name) for name in ("forward", "backward", "optimizer", "step")),
        _number_column("tokens/s", "tokens_per_s", ",.0f"),
        _flops_column("model_flops_per_s"),
        Column(
            header="MFU / causal",
            metrics=("model_flops_utilization", "model_flops_utilization_causal"),
            format=_percentages,
            always=True,
        ),
        _bytes_column("peak", "peak_before_optimizer_bytes", "peak_after_optimizer_bytes"),
    ),
    ("step", "memory"): (
        _bytes_column("after init", "memory_after_init_bytes"),
        _bytes_column("before optimizer", "peak_before_optimizer_bytes"),
        _bytes_column("in optimizer", "peak_after_optimizer_bytes"),
        _bytes_column("resident after init", "resident_peak_after_init_bytes"),
        _bytes_column("resident before optimizer", "resident_peak_before_optimizer_bytes"),
        _bytes_column("resident after optimizer", "resident_peak_after_optimizer_bytes"),
    ),
    ("attention", "time"): (
        *(_time_column(name) for name in ("forward", "backward", "both")),
        _flops_column("flops_per_s"),
        _bytes_column("saved for backward", "saved_for_backward_bytes"),
        _bytes_column("peak", "peak_bytes"),
    ),
    ("kernel", "time"): (
        _number_column("registers", "registers", ".0f"),
        _number_column("spilled (B)", "spill_bytes", ".0f"),
        _bytes_column("shared", "shared_bytes"),
        _number_column("matrix instructions", "matrix_instructions", ".0f"),
        _number_column("occupancy", "occupancy", ".0%"),
        _number_column("FLOPs/B at worst", "worst_intensity", ".0f"),
        _number_column("at best", "best_intensity", ".0f"),
        _number_column("ceiling at worst", "worst_ceiling", ".0%"),
    ),
    ("comparison", "time"): (
        Column(header="forward ratio", metrics=("forward_ratio",), format=_ratio),
        Column(header="backward ratio", metrics=("backward_ratio",), format=_ratio),
        Column(header="time ratio", metrics=("time_ratio",), format=_ratio),
    ),
    ("ddp", "time"): (
        _time_column("step"),
        Column(header="ratio", metrics=("step_time_ratio",), format=_ratio),
        *(_time_column(name) for name in ("forward", "backward")),
        Column(header="exposed (ms)", metrics=("exposed_communication_s",), format=_milliseconds),
        Column(header="alone (ms)", metrics=("communication_s",), format=_milliseconds),
        _number_column("messages", "num_messages", ".0f"),
        _number_column("chosen", "chosen_bucket_size_mb", "g", unit=" MiB"),
    ),
    ("optimizer", "time"): (
        _time_column("step"),
        _time_column("optimizer"),
        *_PEAKS,
        *(
            _bytes_column(name.replace("_", " "), f"before_step_{name}_bytes")
            for name in ("parameters", "gradients", "optimizer_state", "buffers", "activations")
        ),
        _bytes_column("predicted", "predicted_peak_before_step_bytes"),
        _number_column("error", "peak_before_step_bytes_error", "+.2%"),
    ),
    ("optimizer", "memory"): (
        *_PEAKS,
        *(
            _bytes_column(f"predicted {header}", f"predicted_peak_{instant}_bytes")
            for instant, header in _INSTANTS.items()
        ),
        *(
            _bytes_column(f"resident {header}", f"resident_peak_{instant}_bytes")
            for instant, header in _INSTANTS.items()
        ),
    ),
    ("timeline", "time"): _STEP_PARTS,
    ("trace_step", "time"): _STEP_PARTS,
    ("allocation", "time"): (
        _bytes_column("size of each", "size_bytes"),
        _number_column("times", "num_allocations", ".0f"),
    ),
    ("memory_timeline", "time"): (
        _bytes_column("peak", "peak_bytes"),
        *(
            _bytes_column(f"{name.replace('_', ' ')} then", f"{name}_at_peak_bytes")
            for name in ("parameters", "optimizer_state", "gradients", "activations", "temporary")
        ),
    ),
    ("trace_analysis", "time"): (
        _number_column("time (s)", "time_s", ".1f"),
        _rate_column("speed", "bytes_per_s"),
        _bytes_column("resident peak", "resident_peak_bytes"),
        _number_column("events", "num_events", ",.0f"),
    ),
    ("operator", "time"): (
        Column(header="own time (ms)", metrics=("own_time_s",), format=_milliseconds),
        Column(header="share", metrics=("share",), format=_percentages),
        _number_column("calls", "num_calls", ".4g"),
        Column(
            header="matmul FLOPs",
            metrics=("flops",),
            format=lambda metrics: format_decimal(metrics[0].value, ""),
        ),
    ),
    ("ddp", "memory"): (
        _bytes_column("gradients", "gradient_bytes"),
        _bytes_column("peak before optimizer", "peak_before_optimizer_bytes"),
    ),
    ("comm", "time"): (
        Column(header="time (ms)", metrics=("time_s",), format=_milliseconds),
        _rate_column("algorithm bandwidth", "algorithm_bandwidth_bytes_per_s"),
        _rate_column("bus bandwidth", "bus_bandwidth_bytes_per_s"),
    ),
    ("collective_fit", "time"): _COLLECTIVE_FIT,
    ("attempt", "time"): (_number_column("time (s)", "time_s", ".1f"),),
    ("environment", "time"): (_time_column("all_reduce"),),
    ("calibration", "time"): (
        *(_time_column(name) for name in ("forward", "backward")),
        Column(
            header="per number (ns)",
            metrics=("element_time_s",),
            format=lambda metrics: three_digits(metrics[0].value * 1e9),
        ),
        *_COLLECTIVE_FIT,
        Column(
            header="computing loses (ms/MB)",
            metrics=("lost_s_per_byte",),
            format=lambda metrics: three_digits(metrics[0].value * 1e3 * MB),
        ),
        _number_column("messages slow down", "slowdown", ".2f"),
    ),
    ("prediction", "time"): (
        Column(
            header="step (ms)",
            metrics=("step_time_s",),
            format=lambda metrics: _with_interval(
                metrics[0], lambda value: three_digits(value * 1e3)
            ),
        ),
        _sum_column("computing", "matmul_s", "attention_s", "elementwise_s", "launch_s"),
        _sum_column("optimizer", "optimizer_s", "bucket_copy_s"),
        _sum_column("contention", "contention_s"),
        _sum_column("exposed", "exposed_s"),
    ),
}
