"""Costs used by the search: from a calibration, or assumed for a device without one."""

import dataclasses
from collections.abc import Callable
from typing import Any

from paceline.core.hardware import Device
from paceline.core.specs import DType
from paceline.core.units import GB
from paceline.planner.calibrations.calibration import FrameworkCalibration
from paceline.planner.cost.cluster import Cluster
from paceline.planner.cost.layouts import Layouts, Workload
from paceline.planner.cost.topology import Tier, Tiers

Outside = Callable[[Layouts, Workload], tuple[str, ...]]
"""Returns messages about features of layouts outside the range of the calibration's runs."""
Interval = Callable[[Layouts, Workload], tuple[Any, Any]]
"""Returns the lower and upper factors of the interval around predicted times."""

_OF_PEAK = 0.6
_OF_BANDWIDTH = 0.7
_NETWORK_BYTES_PER_S = 50 * GB
_HOST_HOP_S, _NETWORK_HOP_S = 5e-6, 1e-5
_LOW, _HIGH = 0.7, 1.5
_OF_PEAK_WITH_EXPERTS = 0.3
_LOW_WITH_EXPERTS, _HIGH_WITH_EXPERTS = 0.6, 2.6
"""Interval factors that cover 38 of 42 published runs on H100 and B200."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """Achieved rates of devices and links under a framework, with their uncertainty."""

    name: str
    cluster: Cluster
    hidden: float
    """Fraction of a pass that can hide communication."""
    interval: Interval
    outside: Outside
    note: str
    """One-line description of the source of the figures."""

    def with_network(self, bytes_per_s: float) -> "Costs":
        """Returns a copy with this bandwidth between hosts, per device and direction."""
        *inner, outer = self.cluster.tiers.tiers
        tiers = Tiers((*inner, dataclasses.replace(outer, bytes_per_s=bytes_per_s)))
        return dataclasses.replace(self, cluster=dataclasses.replace(self.cluster, tiers=tiers))

    @property
    def network_bytes_per_s(self) -> float:
        """Bandwidth between hosts, per device and direction."""
        return self.cluster.tiers.tiers[-1].bytes_per_s

    def with_hosts(self, devices_per_host: int) -> "Costs":
        """Returns a copy with `devices_per_host` devices per host."""
        inner, *outer = self.cluster.tiers.tiers
        tiers = Tiers((dataclasses.replace(inner, num_devices=devices_per_host), *outer))
        return dataclasses.replace(self, cluster=dataclasses.replace(self.cluster, tiers=tiers))


def calibrated_costs(calibration: FrameworkCalibration) -> Costs:
    """Returns the costs of a calibration."""
    return Costs(
        name=calibration.name,
        cluster=calibration.cluster,
        hidden=calibration.hidden,
        interval=calibration.interval,
        outside=calibration.outside,
        note=f"calibration {calibration.name}: fitted to {len(calibration.rows)} measured runs",
    )


def assumed_costs(
    device: Device, dtype: DType, devices_per_host: int = 8, *, of_experts: bool = False
) -> Costs:
    """Returns costs from the device table: 60% of the peak, 70% of the bandwidth, 400 Gbit/s.

    Mixtures of experts use 30% of the peak, because expert matmuls are small.
    """
    share = _OF_PEAK_WITH_EXPERTS if of_experts else _OF_PEAK
    low, high = (_LOW_WITH_EXPERTS, _HIGH_WITH_EXPERTS) if of_experts else (_LOW, _HIGH)
    kind, off = ("of experts ", "a factor of 2.6") if of_experts else ("", "a third")
    host = Tier(
        name="host",
        num_devices=devices_per_host,
        latency_s=_HOST_HOP_S,
        bytes_per_s=device.links[0].bytes_per_s.value,
    )
    network = Tier(
        name="network", num_devices=None, latency_s=_NETWORK_HOP_S, bytes_per_s=_NETWORK_BYTES_PER_S
    )
    return Costs(
        name="assumed",
        cluster=Cluster(
            flops_per_s=share * device.peak(dtype).value,
            memory_bytes_per_s=_OF_BANDWIDTH * device.memory_bytes_per_s.value,
            tiers=Tiers((host, network)),
        ),
        hidden=1.0,
        interval=lambda layouts, workload: (low, high),
        outside=lambda layouts, workload: (),
        note=f"no calibration {kind}for {device.name}: {share:.0%} of its stated peak, 70% of its "
        "memory bandwidth and 400 Gbit/s between hosts are assumed, and the result may be off by "
        f"{off}",
    )
