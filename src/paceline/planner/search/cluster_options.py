"""A cluster, a batch and a calibration as a user writes them, and the search that they ask for.

Counts and times are text: 4M tokens, 1e24 FLOPs, 30d. The command line imports this module before
it knows its command, so the planner, which needs numpy, is imported where it is used.
"""

import dataclasses
from typing import TYPE_CHECKING, Literal

from paceline.core.errors import UsageError
from paceline.core.hardware import Device, find_device
from paceline.core.specs import DType, Experts, ModelShape
from paceline.core.units import parse_bytes, parse_quantity, parse_rate

if TYPE_CHECKING:
    from paceline.planner.calibrations.calibration import FrameworkCalibration
    from paceline.planner.search.spec import PerformanceModel, SearchSpec


_BINARY = {"k": 2**10, "m": 2**20}
_DECIMAL = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_DAYS = {"h": 1 / 24, "d": 1.0, "w": 7.0}


def parse_batch_tokens(text: str, context_length: int) -> int:
    """Returns sequences per batch; 4M is 4 x 2^20 tokens, as batches are powers of two."""
    tokens = _plain(text)
    if tokens is None:
        tokens = parse_quantity(text, _BINARY, "batch", "4M (4 x 2^20 tokens), 512K or 4194304")
    sequences = tokens / context_length
    if sequences < 1 or sequences != int(sequences):
        nearest = max(1, round(sequences))
        raise UsageError(
            f"--batch-tokens {text} is {sequences:.4g} sequences of {context_length:,} tokens; "
            f"give a multiple of the context length, such as {nearest * context_length}"
        )
    return int(sequences)


def parse_count(text: str, what: str, example: str) -> float:
    """Parses a number such as 1e12, 15T or 300B, with decimal suffixes."""
    number = _plain(text)
    if number is None:
        number = parse_quantity(text, _DECIMAL, what, example)
    if not number > 0:
        raise UsageError(f"--{what} {text} must be positive")
    return number


def parse_days(text: str) -> float:
    """Parses a duration such as 30d, 12h or 2w into days."""
    days = parse_quantity(text, _DAYS, "deadline", "30d, 12h or 2w")
    if not days > 0:
        raise UsageError(f"--deadline {text} must be positive")
    return days


def _plain(text: str) -> float | None:
    try:
        number = float(text.replace(",", "").replace("_", ""))
    except ValueError:
        return None
    if number != number or number in (float("inf"), float("-inf")):
        raise UsageError(f"{text!r} is no number; write it like 1e12")
    return number


def require_some_context(context: int | None) -> None:
    """Raises for a context of no tokens; None is the model's longest."""
    if context is not None and context < 1:
        raise UsageError(f"--context is {context}; it must be at least 1 token")


UNNAMED_CONTEXT = 8192
"""Default context length of a model without a preset; --context overrides it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """A cluster, a batch, and the calibration to predict them with."""

    device: str = "h100-sxm"
    """Kind of device, from the hardware table."""
    devices_per_host: int = 8
    """Devices per host, which share the host's links."""
    batch_tokens: str = "4M"
    """Tokens per step, such as 4M (4 x 2^20), 512K or 4194304."""
    context: int | None = None
    """Context length in tokens; by default, the model's maximum."""
    precision: Literal["bfloat16", "float16", "float8", "float32"] = "bfloat16"
    """dtype of matmuls; below float32, the weights have a float32 master copy."""
    framework: str = "other"
    """Framework that runs the model: torchtitan, nemo, megatron-lm, llm-foundry, fsdp or another
    with published runs, whose constants then predict. other has those that all frameworks share,
    and the wider interval of a framework that nobody has measured."""
    calibration: str | None = None
    """Calibration to predict with instead: the name of a bundled one, or a file of paceline plan
    calibrate."""
    network: str | None = None
    """Bandwidth per device between hosts, such as 400gbit; by default, the calibration's."""
    memory: str | None = None
    """Memory limit of a step on one device, such as 72GiB; by default, the device's memory."""
    price: float | None = None
    """Price of one device-hour, in any currency."""
    device_interval_h: float | None = None
    """Mean hours between failures of one device; by default 50,700, as for Llama 3."""

    def __post_init__(self) -> None:
        if self.devices_per_host < 1:
            raise UsageError("--devices-per-host must be at least 1")
        require_some_context(self.context)
        if self.price is not None and not self.price > 0:
            raise UsageError("--price must be positive")
        if self.device_interval_h is not None and not self.device_interval_h > 0:
            raise UsageError("--device-interval-h must be positive")

    def find(self) -> Device:
        """Returns the device."""
        return find_device(self.device)

    @property
    def failure_interval_h(self) -> float:
        """Mean hours between failures of one device."""
        from paceline.planner.goodput.options import LLAMA3_DEVICE_INTERVAL_H

        return self.device_interval_h or LLAMA3_DEVICE_INTERVAL_H

    def spec(
        self,
        shape: ModelShape,
        num_devices: int,
        *,
        experts: Experts | None = None,
        runnable: bool = False,
    ) -> "SearchSpec":
        """Returns the spec for the search."""
        from paceline.planner.calibrations.framework_settings import FrameworkSettings
        from paceline.planner.search.spec import SearchSpec, training_precision

        calibration = self._calibration(self.precision, of_experts=experts is not None)
        framework_settings = FrameworkSettings(shards_context=runnable)
        precision = training_precision(self.precision, autocast=runnable)
        if calibration is not None and not runnable:
            framework_settings = calibration.framework_settings
            precision = calibration.training_precision
        context = self.context or shape.max_context_length
        # The advertised size is 6% below an H100's real memory. The margin equals the median error
        # of the memory model.
        memory = self.find().memory_bytes.value
        if self.memory is not None:
            memory = parse_bytes(self.memory)
        return SearchSpec(
            shape=shape,
            experts=experts,
            precision=precision,
            framework_settings=framework_settings,
            context_length=context,
            global_batch=parse_batch_tokens(self.batch_tokens, context),
            num_devices=num_devices,
            memory_bytes=memory,
            devices_per_host=self.devices_per_host,
            float8_matmuls=self.precision == "float8",
            runnable=runnable,
        )

    def performance(
        self, precision: DType | None = None, *, of_experts: bool = False
    ) -> "PerformanceModel":
        """Returns the throughput of devices and links, for matmuls in the given precision."""
        from paceline.planner.search.spec import assumed_performance, calibrated_performance

        dtype = precision or self.precision
        calibration = self._calibration(dtype, of_experts=of_experts)
        if calibration is None:
            performance = assumed_performance(self.find(), dtype, of_experts=of_experts)
        else:
            performance = calibrated_performance(calibration)
        performance = performance.with_hosts(self.devices_per_host)
        if self.network is not None:
            performance = performance.with_network(parse_rate(self.network) / 8)
        return performance

    def peak_flops(self) -> float:
        """Returns the nominal peak FLOP/s of matmuls."""
        return self.find().peak(self.precision).value

    def lower_precision(self, *, of_experts: bool = False) -> "PerformanceModel | None":
        """Returns the performance in float8; None if that is not lower, or not supported."""
        is_lower = self.precision in ("bfloat16", "float16")
        if not is_lower or "float8" not in self.find().peak_flops:
            return None
        # For a framework never measured in float8, its float8 performance is unknown.
        in_float8, in_half = (
            self._calibration(dtype, of_experts=of_experts) for dtype in ("float8", "bfloat16")
        )
        has_own = in_float8 is not None or in_half is None
        return self.performance("float8", of_experts=of_experts) if has_own else None

    def _calibration(
        self, dtype: DType, *, of_experts: bool = False
    ) -> "FrameworkCalibration | None":
        """Returns the matching calibration; None if the device and dtype were never measured."""
        from paceline.planner.calibrations.calibration import (
            find_calibration,
            known_calibrations,
            match_calibration,
            read_calibrations,
        )

        name = self.calibration
        if name is None:
            # No framework's runs are in float32.
            return None if dtype == "float32" else self._of_framework(dtype, of_experts)
        if name.endswith(".jsonl"):
            own = match_calibration(read_calibrations(name), self.device, dtype)
            if dtype == self.precision and own is None:
                raise UsageError(f"{name}: contains no calibration for {self.device} with {dtype}")
            return own
        if of_experts:
            raise UsageError(
                f"--calibration {name} is of dense models; name the framework of a mixture of "
                "experts with --framework"
            )
        if self.framework != "other":
            raise UsageError(
                f"--calibration {name} and --framework {self.framework}: each chooses the "
                "constants; give one of them"
            )
        framework = find_calibration(name, self.device, self.precision).framework
        return match_calibration(known_calibrations(), self.device, dtype, framework=framework)

    def _of_framework(self, dtype: DType, of_experts: bool) -> "FrameworkCalibration":
        from paceline.planner.calibrations.pooled import calibration_of

        return calibration_of(self.framework, self.device, dtype, of_experts=of_experts)
