"""The fitted constants: their priors, upper bounds and terms, and the device figures they scale.

All constants are positive and fitted as logarithms. Each has a prior: its typical value as the mean
and a standard deviation in log space. A constant that the rows do not constrain stays at its mean,
so a calibration from few rows remains plausible. Shares are fractions of figures that vendors
state; for devices missing in the hardware table, these are listed here.

A pool of rows fits a separate attention rate, matmul sizes, exposed traffic and latencies. A term
that raised the held-out error of a pool is removed, and one that lowered it is added;
`docs/planner-accuracy.md` lists the effect of each term.
"""

import dataclasses
import math
from collections.abc import Mapping

from paceline.core.errors import HardwareError
from paceline.core.hardware import find_device, known_devices
from paceline.predict.cost.cluster import Cluster, Constant, MeasuredCorrections, Tier, Tiers

_DTYPES = ("bfloat16", "float16", "float8", "float4")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceFigures:
    """Vendor-stated figures of one device."""

    half_flops_per_s: float
    """Dense bfloat16 and float16 peak."""
    memory_bytes_per_s: float
    inner_bytes_per_s: float
    """Bandwidth in one direction within the domain of the fastest link."""
    outer_bytes_per_s: float
    """Bandwidth in one direction between domains, with one network adapter per device."""
    domain: int = 8
    """Number of devices that the fastest link connects."""

    def peak(self, dtype: str) -> float:
        """Returns the dense matmul peak of a dtype. Each halving of the bits doubles it."""
        return self.half_flops_per_s * {"float8": 2.0, "float4": 4.0}.get(dtype, 1.0)


_GRACE_BLACKWELL = DeviceFigures(
    half_flops_per_s=2.5e15,
    memory_bytes_per_s=8e12,
    inner_bytes_per_s=900e9,
    outer_bytes_per_s=50e9,
    domain=64,
)
_BESIDE_THE_TABLE = {
    "gb200": _GRACE_BLACKWELL,
    "gb300": _GRACE_BLACKWELL,
    "b300": dataclasses.replace(_GRACE_BLACKWELL, domain=8),
    # torchtitan's H100s: 500 W, HBM2e.
    "h100-500w-hbm2e": DeviceFigures(
        half_flops_per_s=989.4e12,
        memory_bytes_per_s=2.4e12,
        inner_bytes_per_s=450e9,
        outer_bytes_per_s=50e9,
    ),
}
_NETWORK_BYTES_PER_S = {"a100": 25e9, "v100": 12.5e9}
_DEFAULT_NETWORK = 50e9


def device_figures(name: str) -> DeviceFigures:
    """Returns a device's stated figures, from this module or the hardware table."""
    if name in _BESIDE_THE_TABLE:
        return _BESIDE_THE_TABLE[name]
    device = find_device(name)
    generation = name.split("-", 1)[0]
    return DeviceFigures(
        half_flops_per_s=device.peak("bfloat16" if generation != "v100" else "float16").value,
        memory_bytes_per_s=device.memory_bytes_per_s.value,
        inner_bytes_per_s=device.links[0].bytes_per_s.value,
        outer_bytes_per_s=_NETWORK_BYTES_PER_S.get(generation, _DEFAULT_NETWORK),
    )


def calibratable_devices() -> tuple[str, ...]:
    """Returns the names of all devices with known figures."""
    return (*_BESIDE_THE_TABLE, *(device.name for device in known_devices()))


def require_device(name: str) -> DeviceFigures:
    """Returns a device's figures; raises an error that lists known devices otherwise."""
    try:
        return device_figures(name)
    except HardwareError as error:
        names = ", ".join(calibratable_devices())
        raise HardwareError(f"unknown device {name!r} in a row; known: {names}") from error


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
    "slowdown": Prior(1.0, 0.15),
    "expert_kernels": Prior(1.0, 0.7, 20.0),
    "expert_overlap": Prior(0.5, 0.5, 1.0),
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
    "experts": ("expert_kernels", "expert_overlap"),
    "cells": (),
}
"""Optional terms and the constants that each one needs."""
_INNER_LATENCY_S, _OUTER_LATENCY_S = 6e-6, 1.5e-5


def cluster_of(
    values: Mapping[str, Constant],
    device: DeviceFigures,
    dtype: str,
    *,
    cells: MeasuredCorrections | None = None,
) -> Cluster:
    """Returns the cluster that constants describe on a device. Missing terms are disabled.

    Constants may be columns of points, see `Cluster`.
    """
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
        slowdown=values.get("slowdown", 1.0),
        expert_kernels=values.get("expert_kernels", 0.0),
        expert_overlap=values.get("expert_overlap", 0.0),
        cells=cells,
    )


USUAL_TERMS = ("attention", "matmul_size", "exposed", "latency")
_TERMS: dict[str, tuple[str, ...]] = {
    "bloom": (*USUAL_TERMS, "alignment"),
    "llm-foundry": (*USUAL_TERMS, "step", "cells"),
    "megatron-bridge-experts": ("attention", "matmul_size"),
    "nemo-h100-sxm-bfloat16": ("attention", "matmul_size", "exposed"),
    "nemo-h100-sxm-float8": ("matmul_size",),
    "vtrain": ("attention", "exposed", "latency"),
    "vtrain-host": (*USUAL_TERMS, "dispatch", "step", "cells"),
}


def terms_of(pool: str) -> tuple[str, ...]:
    """Returns the terms of a pool. All llm-foundry pools share the same terms."""
    if pool.startswith("llm-foundry-"):
        return _TERMS["llm-foundry"]
    return _TERMS.get(pool, USUAL_TERMS)
