"""Flags that `plan search` and `plan budget` share: the model, the devices, what they reach."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Literal

from paceline.benchmarks.harness.config import listed
from paceline.cli.plan.quantities import parse_batch_tokens
from paceline.core.device_table import find_device, known_devices
from paceline.core.errors import UsageError
from paceline.core.hardware import Device
from paceline.core.specs import DType, Experts, ModelShape
from paceline.core.units import parse_bytes, parse_rate

if TYPE_CHECKING:
    from paceline.planner.calibrations.calibration import FrameworkCalibration
    from paceline.planner.search.costs import Costs
    from paceline.planner.search.question import SearchQuestion


UNNAMED_CONTEXT = 8192
"""Tokens of a sequence of a model that no preset names, unless --context says otherwise."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Flags of the cluster and the batch."""

    device: Annotated[str, listed(device.name for device in known_devices())] = "h100-sxm"
    """A device of the hardware table."""
    devices_per_host: int = 8
    """Devices that share a host's links."""
    batch_tokens: str = "4M"
    """Tokens of a step, such as 4M (4 x 2^20), 512K or 4194304."""
    context: int | None = None
    """Tokens of a sequence; the model's longest by default."""
    precision: Literal["bfloat16", "float16", "float8", "float32"] = "bfloat16"
    """dtype of matmuls; below 32 bits weights have a float32 copy."""
    calibration: str | None = None
    """What devices reach with a framework: its name (nemo, llm-foundry), or a file of paceline plan
    calibrate; the one of most measured runs by default."""
    network: str | None = None
    """Bandwidth of one device between hosts, such as 400gbit; the calibration's by default."""
    memory: str | None = None
    """What a step may hold on one device, such as 72GiB; the device's memory by default."""
    price: float | None = None
    """Price of one device-hour, in any currency."""
    device_interval_h: float | None = None
    """Mean hours between two failures of one device; Llama 3's by default, 50,700."""

    def __post_init__(self) -> None:
        if self.devices_per_host < 1:
            raise UsageError("--devices-per-host must be at least 1")
        if self.price is not None and not self.price > 0:
            raise UsageError("--price must be positive")
        if self.device_interval_h is not None and not self.device_interval_h > 0:
            raise UsageError("--device-interval-h must be positive")

    def find(self) -> Device:
        """Returns the device."""
        return find_device(self.device)

    @property
    def failure_interval_h(self) -> float:
        """Mean hours between two failures of one device."""
        from paceline.planner.goodput.constants import LLAMA3_DEVICE_INTERVAL_H

        return self.device_interval_h or LLAMA3_DEVICE_INTERVAL_H

    def question(
        self,
        shape: ModelShape,
        num_devices: int,
        *,
        experts: Experts | None = None,
        runnable: bool = False,
    ) -> "SearchQuestion":
        """Returns what is searched."""
        from paceline.planner.calibrations.conventions import Conventions
        from paceline.planner.cost.framework_memory import PLAIN, find_framework_memory
        from paceline.planner.search.question import SearchQuestion, training_precision

        calibration = self._calibration(self.precision, of_experts=experts is not None)
        conventions, beyond = Conventions(shards_context=runnable), PLAIN
        precision = training_precision(self.precision, autocast=runnable)
        if calibration is not None and not runnable:
            conventions = calibration.conventions
            beyond = find_framework_memory(calibration.framework, calibration.precision)
            precision = calibration.training_precision
        context = self.context or shape.max_context_length
        # As advertised: 6% below what an H100 really has, the median error of the account.
        memory = self.find().memory_bytes.value
        if self.memory is not None:
            memory = parse_bytes(self.memory)
        return SearchQuestion(
            shape=shape,
            experts=experts,
            precision=precision,
            conventions=conventions,
            framework_memory=beyond,
            context_length=context,
            global_batch=parse_batch_tokens(self.batch_tokens, context),
            num_devices=num_devices,
            memory_bytes=memory,
            devices_per_host=self.devices_per_host,
            float8_matmuls=self.precision == "float8",
            runnable=runnable,
        )

    def costs(self, precision: DType | None = None, *, of_experts: bool = False) -> "Costs":
        """Returns what devices and links reach with matmuls in a precision."""
        from paceline.planner.search.costs import assumed_costs, calibrated_costs

        dtype = precision or self.precision
        calibration = self._calibration(dtype, of_experts=of_experts)
        if calibration is None:
            costs = assumed_costs(self.find(), dtype, of_experts=of_experts)
        else:
            costs = calibrated_costs(calibration)
        costs = costs.with_hosts(self.devices_per_host)
        if self.network is not None:
            costs = costs.with_network(parse_rate(self.network) / 8)
        return costs

    def peak_flops(self) -> float:
        """Returns the stated peak of matmuls."""
        return self.find().peak(self.precision).value

    def lower_precision(self, *, of_experts: bool = False) -> "Costs | None":
        """Returns the costs of matmuls in float8, where that is lower and devices have it."""
        is_lower = self.precision in ("bfloat16", "float16")
        if not is_lower or "float8" not in self.find().peak_flops:
            return None
        # Of a framework that was never measured in float8 nothing is known there.
        in_float8, in_half = (
            self._calibration(dtype, of_experts=of_experts) for dtype in ("float8", "bfloat16")
        )
        has_own = in_float8 is not None or in_half is None
        return self.costs("float8", of_experts=of_experts) if has_own else None

    def _calibration(
        self, dtype: DType, *, of_experts: bool = False
    ) -> "FrameworkCalibration | None":
        """Returns what was measured; None where no run of the device and dtype is known."""
        from paceline.planner.calibrations.store import (
            find_calibration,
            known_calibrations,
            read_calibrations,
        )

        name = self.calibration
        if name is not None and name.endswith(".jsonl"):
            own = read_calibrations(name)
            matching = [
                each for each in own if (each.device, each.precision) == (self.device, dtype)
            ]
            if dtype == self.precision and not matching:
                raise UsageError(f"{name}: no calibration for {self.device} with {dtype} in it")
            return matching[0] if matching else None
        of_framework = None
        if name is not None:
            named = find_calibration(name, self.device, self.precision, of_experts=of_experts)
            of_framework = named.framework
        known = [
            each
            for each in known_calibrations()
            if (each.device, each.precision) == (self.device, dtype)
            and of_framework in (None, each.framework)
            and each.of_experts == of_experts
        ]
        return known[0] if known else None
