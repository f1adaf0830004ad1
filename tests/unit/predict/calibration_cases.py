"""A calibration of a fictitious machine, in round numbers, and records of a calibration."""

from typing import Any

from paceline.accounting.collectives import CollectiveFit, Segment
from paceline.accounting.overlap import Contention
from paceline.core.plan import Estimate
from paceline.predict.calibration import Calibration, Timed, attention_work, linear_work
from paceline.records import Metric, Record, capture_environment

PLACE: dict[str, Any] = {
    "world_size": 2,
    "num_hosts": 1,
    "backend": "gloo",
    "device": "cpu",
    "hardware": "made up",
    "threads": 1,
    "dtype": "float32",
}
ENVIRONMENT = capture_environment()

PRODUCT_S = 2e-11
"""Seconds per multiplication of a matmul."""


def make_calibration(
    *,
    world_size: int = 2,
    bytes_per_s: float = 1e9,
    latency_s: float = 1e-4,
    lost_s_per_byte: float = 2e-10,
    slowdown: float = 1.5,
) -> Calibration:
    """Returns a calibration whose ranks compute at one rate for every shape."""
    linear = (512, 512, 512)
    attention = (4, 128, 8, 8, 64)
    fit = CollectiveFit(
        segments=(
            Segment(
                smallest_bytes=1e3,
                largest_bytes=1e8,
                latency_s=Estimate(value=latency_s),
                bytes_per_s=Estimate(value=bytes_per_s),
            ),
        ),
        max_relative_error=0.0,
    )
    operations = ("all_reduce", "reduce_to_owners", "gather_from_owners")
    return Calibration(
        topology={
            "world_size": world_size,
            "num_hosts": 1,
            "backend": "gloo",
            "device": "cpu",
            "hardware": "made up",
            "threads": 1,
        },
        linears=(_timed(linear, linear_work(linear)),),
        attentions=(_timed(attention, attention_work(attention)),),
        elementwise_s_per_element=3e-10,
        copy_s_per_element=4e-10,
        forward_launch_s=4e-6,
        backward_launch_s=8e-6,
        optimizer_s_per_parameter=1.5e-9,
        collectives={} if world_size == 1 else dict.fromkeys(operations, fit),
        contentions={}
        if world_size == 1
        else dict.fromkeys(
            operations, Contention(lost_s_per_byte=lost_s_per_byte, slowdown=slowdown)
        ),
        attention_implementation="sdpa",
        float32_matmul_precision="highest",
    )


def _timed(dimensions: tuple[int, ...], work: float) -> Timed:
    return Timed(dimensions=dimensions, forward_s=PRODUCT_S * work, backward_s=2 * PRODUCT_S * work)


def make_record(quantity: str, seconds: float = 1e-3, **fields: Any) -> Record:
    """Returns one record of a calibration, with the same value for all its metrics."""
    names = {
        "linear": ("forward_time_s", "backward_time_s"),
        "attention": ("forward_time_s", "backward_time_s"),
        "call": ("forward_time_s", "backward_time_s"),
        "engine": ("block_time_s",),
        "contention": ("lost_s_per_byte", "slowdown"),
        "collective": ("latency_s", "algorithm_bandwidth_bytes_per_s", "max_relative_error"),
    }.get(quantity, ("element_time_s",))
    return Record(
        kind="calibration",
        case={"quantity": quantity, **PLACE, "float32_matmul_precision": "highest", **fields},
        environment=ENVIRONMENT,
        metrics={name: Metric(value=seconds) for name in names},
        outcome="ok",
    )


def make_records(**place: Any) -> list[Record]:
    """Returns the records of one calibration."""
    heads = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 8}
    return [
        make_record("linear", tokens=64, inputs=16, outputs=16, **place),
        make_record("attention", batch=1, context=64, **heads, attention="sdpa", **place),
        *(make_record(quantity, **place) for quantity in ("stream", "copy", "call", "optimizer")),
        make_record(
            "collective", operation="all_reduce", smallest_bytes=1, largest_bytes=10, **place
        ),
        make_record("contention", operation="all_reduce", size_bytes=4, **place),
    ]
