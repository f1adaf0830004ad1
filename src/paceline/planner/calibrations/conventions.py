"""How frameworks run what a published row does not spell out: dtypes, attention, what is sharded.

Each entry is a default of the framework's own documentation or code at the time of the rows; a
calibration absorbs what is left. Families join the versions of one framework.
"""

import dataclasses

from paceline.core.specs import Precision
from paceline.planner.cost.layouts import AttentionKernel
from paceline.planner.published.run import PublishedRun


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conventions:
    """What all runs of a framework have in common."""

    attention: AttentionKernel = "flash"
    dropout: bool = False
    shards_context: bool = True
    """Whether ZeRO divides states over context ranks as well."""
    reduces_every_pass: bool = False
    fused_loss: bool = False
    repeated_matmuls: float = 0.0
    """Share of matmuls that its selective recomputation repeats."""
    reduction: str = "bfloat16"
    """dtype of gradients on the wire, for 16-bit training."""
    recompute: str = "none"
    """Where a row does not say."""
    as_many_passes_as_stages: bool = False
    """Whether a batch without a micro-batch size is split by the number of pipeline stages."""

    def usual_micro_batch(self, run: PublishedRun) -> int:
        """Returns the micro-batch of a run that does not state any."""
        if self.as_many_passes_as_stages and run.global_batch and run.data:
            return max(run.global_batch // (run.data * run.pipeline), 1)
        return 1


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
_CONVENTIONS = {
    "vtrain-host": Conventions(attention="naive", dropout=True, reduction="float16"),
    "vtrain": Conventions(attention="naive", dropout=True, reduction="float16"),
    "bloom": Conventions(attention="naive", reduction="float16"),
    "megatron-2020": Conventions(
        attention="naive", dropout=True, reduction="float16", recompute="full"
    ),
    "megatron-2021": Conventions(attention="naive", dropout=True, reduction="float16"),
    "megatron-2022": Conventions(attention="naive", dropout=True, reduction="float16"),
    "llm-foundry": Conventions(reduces_every_pass=True, fused_loss=True),
    "maxtext": Conventions(recompute="full"),
    "torchtitan": Conventions(
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
_COMPUTE = {"fp16": "float16", "nvfp4": "float4"}


def family(framework: str, *, one_host: bool = False) -> str:
    """Returns the name under which versions of a framework are calibrated together.

    vTrain's runs on one host and on a cluster are two campaigns, with other models and sequences.
    """
    if one_host and framework == "Megatron-DeepSpeed (vTrain)":
        return "vtrain-host"
    if framework.startswith("Megatron-Bridge"):
        return "megatron-bridge"
    return _FAMILIES.get(framework, framework.lower())


def conventions(framework: str) -> Conventions:
    """Returns what runs of a framework, or of a family, have in common."""
    return _CONVENTIONS.get(family(framework), Conventions())


def device_name(device: str) -> str:
    """Returns a device's name in the hardware table, as far as it is there."""
    return _DEVICES.get(device, device)


def compute_dtype(precision: str) -> str:
    """Returns the dtype of a row's matmuls: bfloat16, float16, float8 or float4."""
    if precision in _COMPUTE:
        return _COMPUTE[precision]
    is_float8 = any(part in precision for part in ("fp8", "float8"))
    return "float8" if is_float8 else "bfloat16"


def training_precision(framework: str, dtype: str) -> Precision:
    """Returns the dtypes of a framework's mixed precision; below 16 bits only matmuls differ."""
    half = "float16" if dtype == "float16" else "bfloat16"
    reduction = conventions(framework).reduction
    if family(framework) == "torchtitan":
        return Precision(compute="bfloat16", reduction="float32")
    return Precision(
        parameters=half,  # type: ignore[arg-type]
        compute=half,  # type: ignore[arg-type]
        gradients="float32" if half == "bfloat16" else "float16",
        reduction=reduction,  # type: ignore[arg-type]
        master_weights=True,
    )
