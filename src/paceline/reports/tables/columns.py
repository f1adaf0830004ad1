"""Table columns by kind of record: their metrics and formats."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal

from paceline.core.units import MB, format_binary_bytes, format_decimal
from paceline.records import Metric
from paceline.records.schema import with_interval

View = Literal["time", "memory"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Column:
    """One column, which formats one or more metrics."""

    header: str
    metrics: tuple[str, ...]
    format: Callable[[Sequence[Metric]], str]
    always: bool = False
    """Whether the column is shown even if no record has a value."""


UNSTEADY = "(!)"
"""Marks a time whose standard deviation exceeds the time itself."""


def three_digits(value: float) -> str:
    """Formats a number with three significant digits, but at least all of its integer part."""
    digits = 2 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{max(0, min(digits, 4))}f}"


def _in_milliseconds(seconds: float) -> str:
    return three_digits(seconds * 1e3)


def _with_deviation(metric: Metric) -> str:
    # One sample has no spread; writing ± 0 would claim that it is exact.
    if metric.std is None or len(metric.samples) < 2:
        return _in_milliseconds(metric.value)
    text = f"{_in_milliseconds(metric.value)} ± {_in_milliseconds(metric.std)}"
    return f"{text} {UNSTEADY}" if metric.std > metric.value else text


def _column(header: str, metric: str, write: Callable[[float], str]) -> Column:
    """Returns a column with a metric and its interval, if it has one."""
    return Column(
        header=header, metrics=(metric,), format=lambda metrics: with_interval(metrics[0], write)
    )


def _number_column(header: str, metric: str, digits: str, *, unit: str = "") -> Column:
    return _column(header, metric, lambda value: f"{value:{digits}}{unit}")


def _decimal_column(header: str, metric: str, unit: str = "") -> Column:
    return _column(header, metric, lambda value: format_decimal(value, unit))


def _time_column(name: str, metric: str = "") -> Column:
    """Returns a column with a time in milliseconds and its standard deviation."""
    return Column(
        header=f"{name} (ms)",
        metrics=(metric or f"{name}_time_s",),
        format=lambda metrics: _with_deviation(metrics[0]),
    )


def _sum_column(header: str, *metrics: str) -> Column:
    return Column(
        header=f"{header} (ms)",
        metrics=metrics,
        format=lambda present: _in_milliseconds(sum(metric.value for metric in present)),
    )


def _bytes_column(header: str, *metrics: str) -> Column:
    """Returns a column with the largest of several sizes."""
    return Column(
        header=header,
        metrics=metrics,
        format=lambda present: format_binary_bytes(max(metric.value for metric in present)),
    )


def _bytes_columns(names: Sequence[str], metric: str, header: str = "{}") -> tuple[Column, ...]:
    """Returns a size column per name, which replaces `{}` in `metric` and `header`."""
    return tuple(
        _bytes_column(header.format(name.replace("_", " ")), metric.format(name)) for name in names
    )


# Breakdown of a step: the columns before "step" add up to it.
_STEP_PARTS = tuple(
    _time_column(name, metric)
    for name, metric in (
        ("compute", "compute_s"),
        ("contention", "contention_s"),
        ("exposed", "exposed_communication_s"),
        ("idle", "idle_s"),
        ("step", "step_time_s"),
        ("overlapped", "overlapped_communication_s"),
        ("exposed, as reported", "reported_exposed_s"),
    )
)
_INSTANTS = ("after_init", "before_step", "after_step")
_COLLECTIVE_FIT = (
    _column("latency (ms)", "latency_s", _in_milliseconds),
    _decimal_column("bandwidth", "algorithm_bandwidth_bytes_per_s", "B/s"),
    _number_column("largest error", "max_relative_error", ".1%"),
)

COLUMNS: dict[tuple[str, View], tuple[Column, ...]] = {
    ("step", "time"): (
        *(_time_column(name) for name in ("forward", "backward", "optimizer", "step")),
        _number_column("tokens/s", "tokens_per_s", ",.0f"),
        _decimal_column("FLOP/s", "model_flops_per_s"),
        Column(
            header="MFU / causal",
            metrics=("model_flops_utilization", "model_flops_utilization_causal"),
            format=lambda metrics: " / ".join(f"{metric.value:.1%}" for metric in metrics),
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
        _decimal_column("FLOP/s", "flops_per_s"),
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
        _number_column("forward ratio", "forward_ratio", ".3f"),
        _number_column("backward ratio", "backward_ratio", ".3f"),
        _number_column("time ratio", "time_ratio", ".3f"),
    ),
    ("ddp", "time"): (
        _time_column("step"),
        _number_column("ratio", "step_time_ratio", ".3f"),
        *(_time_column(name) for name in ("forward", "backward")),
        _time_column("exposed", "exposed_communication_s"),
        _time_column("communication time", "communication_s"),
        _number_column("collectives", "num_messages", ".0f"),
        _number_column("chosen bucket size", "chosen_bucket_size_mb", "g", unit=" MiB"),
    ),
    ("layout", "time"): (
        _time_column("step"),
        _column("predicted (ms)", "predicted_step_time_s", _in_milliseconds),
        _number_column("error", "step_time_s_error", "+.1%"),
        _number_column("ratio", "step_time_ratio", ".3f"),
        _number_column("tokens/s", "tokens_per_s", ",.0f"),
        _bytes_column("peak", "peak_bytes"),
        _bytes_column("predicted", "predicted_peak_bytes"),
        _number_column("memory error", "peak_bytes_error", "+.1%"),
    ),
    ("layout_trace", "time"): (
        _time_column("step"),
        _time_column("compute", "compute_s"),
        _time_column("contention", "contention_s"),
        _time_column("exposed communication", "exposed_communication_s"),
        _time_column("idle", "idle_s"),
    ),
    ("pipeline", "time"): (
        _time_column("step", "duration_s"),
        _time_column("work", "work_s"),
        _number_column("idle / work", "idle", ".1%"),
        _number_column("measured bubble", "bubble", ".1%"),
        _number_column("(p - 1) / (v m)", "predicted_bubble", ".1%"),
        _number_column("bubble of the order", "order_bubble", ".1%"),
        _number_column("messages", "messages", ".1%"),
        _number_column("imbalance", "imbalance", ".1%"),
    ),
    ("optimizer", "time"): (
        _time_column("step"),
        _time_column("optimizer"),
        *_bytes_columns(_INSTANTS, "peak_{}_bytes"),
        *_bytes_columns(
            ("parameters", "gradients", "optimizer_state", "buffers", "activations"),
            "before_step_{}_bytes",
        ),
        _bytes_column("predicted", "predicted_peak_before_step_bytes"),
        _number_column("error", "peak_before_step_bytes_error", "+.2%"),
    ),
    ("optimizer", "memory"): (
        *_bytes_columns(_INSTANTS, "peak_{}_bytes"),
        *_bytes_columns(_INSTANTS, "predicted_peak_{}_bytes", "predicted {}"),
        *_bytes_columns(_INSTANTS, "resident_peak_{}_bytes", "resident {}"),
    ),
    ("timeline", "time"): _STEP_PARTS,
    ("trace_step", "time"): _STEP_PARTS,
    ("allocation", "time"): (
        _bytes_column("size of each", "size_bytes"),
        _number_column("times", "num_allocations", ".0f"),
    ),
    ("memory_timeline", "time"): (
        _bytes_column("peak", "peak_bytes"),
        *_bytes_columns(
            ("parameters", "optimizer_state", "gradients", "activations", "temporary"),
            "{}_at_peak_bytes",
            "{} then",
        ),
    ),
    ("trace_analysis", "time"): (
        _number_column("time (s)", "time_s", ".1f"),
        _decimal_column("speed", "bytes_per_s", "B/s"),
        _bytes_column("resident peak", "resident_peak_bytes"),
        _number_column("events", "num_events", ",.0f"),
    ),
    ("operator", "time"): (
        _time_column("own time", "own_time_s"),
        _number_column("share", "share", ".1%"),
        _number_column("calls", "num_calls", ".4g"),
        _decimal_column("matmul FLOPs", "flops"),
    ),
    ("ddp", "memory"): (
        _bytes_column("gradients", "gradient_bytes"),
        _bytes_column("peak before optimizer", "peak_before_optimizer_bytes"),
    ),
    ("training_run", "time"): (
        _number_column("loss", "loss", ".4f"),
        _number_column("held-out loss", "heldout_loss", ".4f"),
        _number_column("bits per byte", "bits_per_byte", ".4f"),
        _number_column("tokens/s", "tokens_per_s", ",.0f"),
        _time_column("step"),
        _column("predicted step (ms)", "predicted_step_time_s", _in_milliseconds),
        _time_column("exposed", "exposed_communication_s"),
        _number_column("MFU", "model_flops_utilization", ".1%"),
        _bytes_column("memory", "memory_bytes"),
    ),
    ("comm", "time"): (
        _time_column("time", "time_s"),
        _decimal_column("algorithm bandwidth", "algorithm_bandwidth_bytes_per_s", "B/s"),
        _decimal_column("bus bandwidth", "bus_bandwidth_bytes_per_s", "B/s"),
    ),
    ("collective_fit", "time"): _COLLECTIVE_FIT,
    ("rendezvous", "time"): (
        _time_column("connect, a client", "connect_median_client_s"),
        _time_column("counter, all", "counter_time_s"),
        _time_column("counter, a client", "counter_median_client_s"),
        _time_column("keys, all", "keys_time_s"),
        _time_column("keys, a client", "keys_median_client_s"),
        _time_column("quorum, all", "quorum_time_s"),
        _time_column("quorum, a client", "quorum_median_client_s"),
    ),
    ("attempt", "time"): (_number_column("time (s)", "time_s", ".1f"),),
    ("environment", "time"): (_time_column("all_reduce"),),
    ("calibration", "time"): (
        *(_time_column(name) for name in ("forward", "backward", "block")),
        _column("per element (ns)", "element_time_s", lambda seconds: three_digits(seconds * 1e9)),
        *_COLLECTIVE_FIT,
        _column(
            "compute lost (ms/MB)",
            "lost_s_per_byte",
            lambda seconds: three_digits(seconds * 1e3 * MB),
        ),
        _number_column("communication slowdown", "slowdown", ".2f"),
    ),
    ("prediction", "time"): (
        _column("step (ms)", "step_time_s", _in_milliseconds),
        _sum_column("compute", "matmul_s", "attention_s", "elementwise_s", "launch_s"),
        _sum_column("optimizer", "optimizer_s", "bucket_copy_s"),
        _sum_column("contention", "contention_s"),
        _sum_column("exposed", "exposed_s"),
    ),
}
