"""The search question: a model, its batch, the devices, and constraints on the layout."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from paceline.core.errors import UsageError, did_you_mean
from paceline.core.plan import CHECKPOINTINGS
from paceline.core.specs import DType, Experts, ModelShape, Precision, require_at_least
from paceline.planner.calibrations.conventions import Conventions
from paceline.planner.cost.framework_memory import PLAIN, FrameworkMemory
from paceline.planner.cost.layouts import CHECKPOINTING, Workload

_CONVENTIONS = {field.name for field in dataclasses.fields(Workload)} & {
    field.name for field in dataclasses.fields(Conventions)
}
"""Names of the framework conventions that are also workload fields."""
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
class SearchQuestion:
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
    conventions: Conventions = dataclasses.field(
        default_factory=lambda: Conventions(shards_context=False)
    )
    """The framework's conventions: attention kernel, sharding, when gradients are averaged."""
    framework_memory: FrameworkMemory = PLAIN
    """The framework's memory overhead beyond the formulas."""
    fixed: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Fixed values of layout fields, keyed by the values of `SHORT_NAMES`."""
    least_used: float = 0.9
    """Minimum fraction of the held devices that a layout must use. Idle devices are allowed because
    not every device count divides the work evenly."""

    def __post_init__(self) -> None:
        require_at_least(self, 1, "context_length", "global_batch", "num_devices")
        require_at_least(self, 1, "devices_per_host")
        if not self.memory_bytes > 0:
            raise UsageError(
                f"SearchQuestion.memory_bytes is {self.memory_bytes}; it must be positive"
            )
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
            **{name: getattr(self.conventions, name) for name in _CONVENTIONS},
            trainer_stages=self.runnable,
            framework_memory=self.framework_memory,
            experts=self.experts,
        )


def training_precision(compute: DType, *, autocast: bool = False) -> Precision:
    """Returns the dtypes of mixed precision: float32 gradients and float32 master weights.

    Args:
        compute: dtype of matmuls; with float8, the weights and activations are bfloat16.
        autocast: Whether weights stay in float32 and are cast per operation, as in Paceline's
            trainer.
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
            hint = did_you_mean(name, SHORT_NAMES)
            raise UsageError(f"unknown field {name!r}; {hint}known: {', '.join(SHORT_NAMES)}")
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
