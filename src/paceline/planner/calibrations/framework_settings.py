"""Framework defaults that published rows leave out: dtypes, attention kernel, sharding.

Each entry is a default from the framework's documentation or code at the time of the rows. The
calibration absorbs the remaining differences. A family joins the versions of one framework.
"""

import dataclasses
from typing import Any

from paceline.core.hardware import device_spelling
from paceline.core.specs import Precision
from paceline.planner.calibrations.parameters import calibratable_devices
from paceline.planner.published import PublishedRun
from paceline.predict.cost.framework_memory import find_framework_memory
from paceline.predict.cost.layouts import StepSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrameworkSettings(StepSettings):
    """Defaults shared by all runs of a framework."""

    shards_context: bool = True
    """Whether ZeRO also shards states over context ranks."""
    reduction: str = "bfloat16"
    """dtype of gradients during reduction, for 16-bit training."""
    recompute: str = "none"
    """Recomputation mode if a row does not state one."""
    as_many_passes_as_stages: bool = False
    """Whether a batch with no stated micro-batch is split into one micro-batch per stage."""

    def usual_micro_batch(self, run: PublishedRun) -> int:
        """Returns the micro-batch of a run that does not state one."""
        if self.as_many_passes_as_stages and run.global_batch and run.data:
            return max(run.global_batch // (run.data * run.pipeline), 1)
        return 1

    def of_steps(self) -> dict[str, Any]:
        """Returns the settings that a workload has too."""
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(StepSettings)}


_FAMILIES = {
    "Megatron-DeepSpeed (vTrain)": "vtrain",
    "Megatron-DeepSpeed (BLOOM)": "bloom",
    "Megatron-LM 2020": "megatron-2020",
    "Megatron-LM 2021": "megatron-2021",
    "Megatron-LM 2022": "megatron-2022",
    "Megatron-LM": "megatron-2023",
    "Megatron-Core r0.8.0": "megatron-core",
    "Megatron-Core": "nemo",
    "NeMo": "nemo",
    "NeMo 24.07": "nemo",
    "fms-fsdp (PyTorch FSDP, compile)": "fms-fsdp",
}
ALIASES = {"fsdp": "fms-fsdp", "megatron-core": "nemo", "megatron-lm": "megatron-2023"}
"""Names that people use for a framework, and the family under which its runs are published."""
_BY_LOWER_CASE = {name.lower(): its for name, its in _FAMILIES.items()} | ALIASES
_SETTINGS = {
    "vtrain-host": FrameworkSettings(attention="naive", dropout=True, reduction="float16"),
    "vtrain": FrameworkSettings(attention="naive", dropout=True, reduction="float16"),
    "bloom": FrameworkSettings(attention="naive", reduction="float16"),
    "megatron-2020": FrameworkSettings(
        attention="naive", dropout=True, reduction="float16", recompute="full"
    ),
    "megatron-2021": FrameworkSettings(attention="naive", dropout=True, reduction="float16"),
    "megatron-2022": FrameworkSettings(attention="naive", dropout=True, reduction="float16"),
    "llm-foundry": FrameworkSettings(reduces_every_pass=True, fused_loss=True),
    "maxtext": FrameworkSettings(recompute="full"),
    "torchtitan": FrameworkSettings(
        reduction="float32", as_many_passes_as_stages=True, fused_loss=True, repeated_matmuls=0.5
    ),
}
_DEVICES = {
    "h100-sxm-80gb": "h100-sxm",
    "h100": "h100-sxm",
    "h200": "h200-sxm",
    "b200": "b200-sxm",
    "v100-sxm-32gb": "v100-sxm2-32gb",
}
_COMPUTE = {"fp16": "float16", "float16": "float16", "nvfp4": "float4", "float4": "float4"}


def family(framework: str, *, one_host: bool = False) -> str:
    """Returns the family name under which all versions of a framework are calibrated, in any case.

    vTrain's single-host and cluster runs are separate campaigns with different models and sequence
    lengths, so they form two families.
    """
    lower = framework.lower()
    if one_host and lower == "megatron-deepspeed (vtrain)":
        return "vtrain-host"
    if lower.startswith("megatron-bridge"):
        return "megatron-bridge"
    return _BY_LOWER_CASE.get(lower, lower)


def framework_settings(framework: str, dtype: str = "") -> FrameworkSettings:
    """Returns the settings of a framework or family, with its memory for matmuls in `dtype`."""
    name = family(framework)
    memory = find_framework_memory(name, dtype)
    return dataclasses.replace(_SETTINGS.get(name, FrameworkSettings()), framework_memory=memory)


def device_name(device: str) -> str:
    """Returns the name under which a device's figures are known; any other name unchanged."""
    lower = device.lower()
    if lower in calibratable_devices():
        return lower
    return _DEVICES.get(lower, device_spelling(device))


def compute_dtype(precision: str) -> str:
    """Returns the dtype of a row's matmuls: bfloat16, float16, float8 or float4."""
    if precision in _COMPUTE:
        return _COMPUTE[precision]
    is_float8 = any(part in precision for part in ("fp8", "float8"))
    return "float8" if is_float8 else "bfloat16"


def training_precision(framework: str, dtype: str) -> Precision:
    """Returns a framework's mixed-precision dtypes. Below 16 bits, only matmuls differ."""
    half = "float16" if dtype == "float16" else "bfloat16"
    reduction = framework_settings(framework).reduction
    if family(framework) == "torchtitan":
        return Precision(compute="bfloat16", reduction="float32")
    return Precision(
        parameters=half,  # type: ignore[arg-type]
        compute=half,  # type: ignore[arg-type]
        gradients="float32" if half == "bfloat16" else "float16",
        reduction=reduction,  # type: ignore[arg-type]
        master_weights=True,
    )
