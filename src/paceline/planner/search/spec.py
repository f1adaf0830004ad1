"""The inputs of a search: a model and its devices, and the performance of these devices."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from paceline.core.errors import UsageError, unknown_name
from paceline.core.hardware import Device
from paceline.core.plan import CHECKPOINTINGS
from paceline.core.specs import DType, Experts, ModelShape, Precision, require_at_least
from paceline.core.units import GB
from paceline.planner.calibrations.calibration import FrameworkCalibration
from paceline.planner.calibrations.framework_settings import FrameworkSettings
from paceline.predict.cost.cluster import Cluster, Tier, Tiers
from paceline.predict.cost.layouts import CHECKPOINTING, Layouts, Workload

SHORT_NAMES = {
    "dp": "data_parallel",
    "replicate": "replicate",
    "shard": "shard",
    "tp": "tensor",
    "sp": "sequence_parallel",
    "cp": "context",
    "ep": "expert",
    "pp": "pipeline",
    "vp": "pipeline_interleave",
    "zero": "stage",
    "micro": "micro_batch",
    "recompute": "checkpointing",
}
"""Short names of layout fields, used by `--compare` and in tables."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchSpec:
    """Inputs of a search for the layout that trains a model fastest on given devices."""

    shape: ModelShape
    """The model's dimensions. For a mixture of experts, `d_ff` is the active width."""
    precision: Precision
    context_length: int
    """Tokens per sequence."""
    global_batch: int
    """Sequences per step, over all ranks."""
    num_devices: int
    """Number of held devices. A layout may leave some of them idle."""
    memory_bytes: float
    """Limit on the peak memory of one device."""
    devices_per_host: int = 8
    experts: Experts | None = None
    """The experts that replace feed-forward layers; None for a dense model."""
    float8_matmuls: bool = False
    """Whether matmuls run in float8 instead of the compute dtype of `precision`."""
    runnable: bool = False
    """Whether to search only layouts that Paceline's trainer runs."""
    framework_settings: FrameworkSettings = dataclasses.field(
        default_factory=lambda: FrameworkSettings(shards_context=False)
    )
    """The framework's settings: attention kernel, sharding, when gradients are averaged, memory."""
    fixed: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Fixed values of layout fields, keyed by the values of `SHORT_NAMES`."""
    least_used: float = 0.9
    """Minimum fraction of the held devices that a layout must use. Idle devices are allowed because
    not every device count divides the work evenly."""

    def __post_init__(self) -> None:
        require_at_least(self, 1, "context_length", "global_batch", "num_devices")
        require_at_least(self, 1, "devices_per_host")
        if not self.memory_bytes > 0:
            raise UsageError(f"SearchSpec.memory_bytes is {self.memory_bytes}; it must be positive")
        if self.experts is not None and self.runnable:
            raise UsageError(
                "paceline train does not support mixtures of experts, so no layout is runnable; "
                "search without --runnable, or use a dense model"
            )
        if self.experts is None and self.fixed.get("expert", 1) != 1:
            raise UsageError(
                f"ep={self.fixed['expert']}: the model has no experts to divide; leave ep out, or "
                "search a mixture of experts"
            )

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step, over all ranks."""
        return self.global_batch * self.context_length

    def workload(self, micro_batch: Any, num_micro_batches: Any) -> Workload:
        """Returns the workload of one data-parallel rank. Both arguments may be arrays."""
        return Workload(
            shape=self.shape,
            precision=self.precision,
            context_length=self.context_length,
            micro_batch=micro_batch,
            num_micro_batches=num_micro_batches,
            **self.framework_settings.of_steps(),
            trainer_stages=self.runnable,
            experts=self.experts,
        )


def training_precision(compute: DType, *, autocast: bool = False) -> Precision:
    """Returns the dtypes of mixed precision with matmuls in `compute`.

    With float8, weights and activations are bfloat16. With `autocast`, as in Paceline's trainer,
    weights stay in float32; otherwise they have float32 master weights.
    """
    if compute == "float32":
        return Precision()
    half: DType = "bfloat16" if compute == "float8" else compute
    if autocast:
        return Precision(compute=half, autocast=True)
    return Precision(parameters=half, compute=half, master_weights=True)


def parse_fixed(text: str) -> dict[str, int]:
    """Parses layout fields such as ``tp=8,pp=2,recompute=full``."""
    fixed: dict[str, int] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, _, value = part.partition("=")
        if name not in SHORT_NAMES:
            raise unknown_name("unknown field", name, SHORT_NAMES)
        fixed[SHORT_NAMES[name]] = _number(name, value)
    if not fixed:
        raise UsageError("name fields of a layout, such as tp=8,pp=2")
    return fixed


def describe_fixed(fixed: Mapping[str, int]) -> str:
    """Returns layout fields in the format of `parse_fixed`."""
    short = {field: name for name, field in SHORT_NAMES.items()}
    return ",".join(
        f"{short[field]}={CHECKPOINTINGS[value] if field == 'checkpointing' else value}"
        for field, value in fixed.items()
    )


def _number(name: str, value: str) -> int:
    if name == "recompute" and value in CHECKPOINTING:
        return CHECKPOINTING[value]
    if not value.isdecimal():
        what = f"one of {', '.join(CHECKPOINTING)}" if name == "recompute" else "a whole number"
        raise UsageError(f"{name}={value}: give {what}")
    return int(value)


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
class PerformanceModel:
    """Achieved rates of devices and links under a framework, with their uncertainty."""

    name: str
    cluster: Cluster
    hidden: float
    """Fraction of a pass that can hide communication."""
    interval: Interval
    outside: Outside
    source: str
    """Whose runs the figures are from: framework, device, dtype and number of runs."""
    note: str
    """One-line description of the source of the figures."""
    framework: str = "other"
    num_rows: int = 0
    """Number of measured runs of this framework on this device and dtype."""

    def with_network(self, bytes_per_s: float) -> "PerformanceModel":
        """Returns a copy with this bandwidth between hosts, per device and direction."""
        *inner, outer = self.cluster.tiers.tiers
        tiers = Tiers((*inner, dataclasses.replace(outer, bytes_per_s=bytes_per_s)))
        return dataclasses.replace(self, cluster=dataclasses.replace(self.cluster, tiers=tiers))

    @property
    def network_bytes_per_s(self) -> float:
        """Bandwidth between hosts, per device and direction."""
        return float(self.cluster.tiers.tiers[-1].bytes_per_s)

    def with_hosts(self, devices_per_host: int) -> "PerformanceModel":
        """Returns a copy with `devices_per_host` devices per host."""
        inner, *outer = self.cluster.tiers.tiers
        tiers = Tiers((dataclasses.replace(inner, num_devices=devices_per_host), *outer))
        return dataclasses.replace(self, cluster=dataclasses.replace(self.cluster, tiers=tiers))


def calibrated_performance(calibration: FrameworkCalibration) -> PerformanceModel:
    """Returns the performance of a calibration."""
    return PerformanceModel(
        name=calibration.name,
        cluster=calibration.cluster,
        hidden=calibration.hidden,
        interval=calibration.interval,
        outside=calibration.outside,
        source=_source(calibration),
        note=_note(calibration),
        framework=calibration.framework,
        num_rows=(calibration.rows_elsewhere if calibration.of_experts else len(calibration.rows)),
    )


def _source(calibration: FrameworkCalibration) -> str:
    whose = f"framework {calibration.framework} on {calibration.device}, {calibration.precision}"
    elsewhere = _runs(calibration.rows_elsewhere)
    if calibration.of_experts and elsewhere:
        return f"{whose}: {elsewhere} of its mixtures, on several devices"
    runs = _runs(len(calibration.rows)) or "no measured run"
    return f"{whose}: {runs} of it{f', {elsewhere} elsewhere' if elsewhere else ''}"


def _runs(number: int) -> str:
    return "" if not number else f"{number:,} measured run{'s'[: number > 1]}"


def _note(calibration: FrameworkCalibration) -> str:
    if calibration.of_experts and not calibration.rows:
        return (
            "Only Megatron-Bridge has published runs of mixtures of experts, so the constants are "
            "those of its newest release or, of another framework, what they have in common with it"
        )
    if calibration.rows:
        return f"calibration {calibration.name}: fitted to {_runs(len(calibration.rows))}"
    if calibration.rows_elsewhere:
        return (
            f"The constants are {calibration.framework}'s on other devices, with this device's "
            "figures. One run of your own (paceline plan calibrate) narrows the interval most."
        )
    return (
        f"No run of framework {calibration.framework} is known, so the constants are what "
        "frameworks have in common. --framework names one with runs; one run of your own "
        "(paceline plan calibrate) narrows the interval most."
    )


def assumed_performance(
    device: Device, dtype: DType, devices_per_host: int = 8, *, of_experts: bool = False
) -> PerformanceModel:
    """Returns performance from the device table: 60% of the peak, 70% of the bandwidth, 400 Gbit/s.

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
    return PerformanceModel(
        name="assumed",
        cluster=Cluster(
            flops_per_s=share * device.peak(dtype).value,
            memory_bytes_per_s=_OF_BANDWIDTH * device.memory_bytes_per_s.value,
            tiers=Tiers((host, network)),
        ),
        hidden=1.0,
        interval=lambda layouts, workload: (low, high),
        outside=lambda layouts, workload: (),
        source=f"no calibration {kind}for {device.name}, {dtype}",
        note=f"no calibration {kind}for {device.name}: {share:.0%} of its stated peak, 70% of its "
        "memory bandwidth and 400 Gbit/s between hosts are assumed, and the result may be off by "
        f"{off}",
    )
