"""The fitted constants: their priors, upper bounds and terms.

All constants are positive and fitted as logarithms. Each has a prior: its typical value as the mean
and a standard deviation in log space. A constant that the rows do not constrain stays at its mean,
so a calibration from few rows remains plausible.
"""

import dataclasses
import math
from collections.abc import Mapping

from paceline.planner.calibrations.devices import DeviceFigures
from paceline.planner.cost.cluster import Cluster
from paceline.planner.cost.measured_cells import MeasuredCells
from paceline.planner.cost.topology import Tier, Tiers


@dataclasses.dataclass(frozen=True)
class Prior:
    """Prior of one constant, in log space."""

    mean: float
    deviation: float
    """Standard deviation of the logarithm."""
    most: float = math.inf
    """Upper bound."""


PRIORS: dict[str, Prior] = {
    "matmul_share": Prior(0.7, 0.3, 1.0),
    "memory_share": Prior(0.7, 0.3, 1.0),
    "inner_share": Prior(0.6, 0.5, 1.0),
    "outer_share": Prior(0.6, 0.7, 1.2),
    "hidden": Prior(0.8, 0.5, 1.0),
    "attention_share": Prior(0.35, 0.6, 1.0),
    "dispatch_s": Prior(4e-5, 1.0, 3e-4),
    "matmul_tokens": Prior(100.0, 1.0, 4e3),
    "matmul_width": Prior(200.0, 1.0, 4e3),
    "misaligned": Prior(0.05, 1.0, 1.0),
    "exposed_share": Prior(0.3, 1.0, 1.0),
    "contention": Prior(0.03, 1.0, 1.0),
    "outer_latency_s": Prior(1.5e-5, 2.0, 1e-1),
    "inner_latency_s": Prior(6e-6, 1.0, 1e-3),
    "step_s": Prior(0.01, 1.0, 10.0),
    "async_share": Prior(0.9, 0.5, 3.0),
}
"""Priors of all constants. Shares are fractions of the vendor's stated figures."""
ALWAYS = ("matmul_share", "memory_share", "inner_share", "outer_share", "hidden")
TERMS: dict[str, tuple[str, ...]] = {
    "attention": ("attention_share",),
    "dispatch": ("dispatch_s",),
    "matmul_size": ("matmul_tokens", "matmul_width"),
    "alignment": ("misaligned",),
    "exposed": ("exposed_share", "contention"),
    "latency": ("inner_latency_s", "outer_latency_s"),
    "step": ("step_s",),
    "cells": (),
}
"""Optional terms and the constants that each one needs."""
_INNER_LATENCY_S, _OUTER_LATENCY_S = 6e-6, 1.5e-5


def cluster_of(
    values: Mapping[str, float],
    device: DeviceFigures,
    dtype: str,
    *,
    cells: MeasuredCells | None = None,
) -> Cluster:
    """Returns the cluster that constants describe on a device. Missing terms are disabled."""
    half = device.half_flops_per_s
    tiers = Tiers(
        (
            Tier(
                name="host",
                num_devices=device.domain,
                latency_s=values.get("inner_latency_s", _INNER_LATENCY_S),
                bytes_per_s=values["inner_share"] * device.inner_bytes_per_s,
            ),
            Tier(
                name="network",
                num_devices=None,
                latency_s=values.get("outer_latency_s", _OUTER_LATENCY_S),
                bytes_per_s=values["outer_share"] * device.outer_bytes_per_s,
            ),
        )
    )
    attention = values.get("attention_share")
    # Operands are read, cast and written at the same speed for every matmul dtype. Reaching twice
    # the rate therefore needs twice the size.
    faster = device.peak(dtype) / half
    return Cluster(
        flops_per_s=values["matmul_share"] * device.peak(dtype),
        memory_bytes_per_s=values["memory_share"] * device.memory_bytes_per_s,
        tiers=tiers,
        # Attention is computed in bf16 or fp16 regardless of the matmul dtype.
        attention_flops_per_s=None if attention is None else attention * half,
        matmul_tokens=faster * values.get("matmul_tokens", 0.0),
        matmul_width=faster * values.get("matmul_width", 0.0),
        dispatch_s=values.get("dispatch_s", 0.0),
        misaligned=values.get("misaligned", 0.0),
        exposed_share=values.get("exposed_share", 0.0),
        contention=values.get("contention", 0.0),
        step_s=values.get("step_s", 0.0),
        cells=cells,
    )
