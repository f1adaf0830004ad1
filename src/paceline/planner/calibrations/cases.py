"""Converts measured runs to the cost model's input: arrays of layouts, in groups.

A row can be predicted if it states the model's dimensions, devices, batch, layout and step time.
The framework's settings supply missing values, including the micro-batch. A row is not predicted
if its axes do not multiply to its devices, or if its batch does not divide evenly.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.accounting.counts import flops_per_token
from paceline.core.errors import UsageError
from paceline.core.specs import Experts, ModelShape
from paceline.planner.calibrations.framework_settings import (
    compute_dtype,
    device_name,
    family,
    framework_settings,
    training_precision,
)
from paceline.planner.calibrations.parameters import require_device
from paceline.planner.published import PublishedRun, model_of
from paceline.predict.cost.layouts import CHECKPOINTING, Layouts, Workload, formula_of, join_shapes

Array = npt.NDArray[np.float64]


_FITTED_BY_DEVICE = ("nemo", "llm-foundry", "paxml")
"""Frameworks with enough rows to fit each device separately. Others fit all devices together."""


class Variant(NamedTuple):
    """A combination of device, dtype and mode that has its own matmul rate."""

    device: str
    dtype: str
    variation: str = ""
    """A non-default mode of the framework, such as eager."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One row that can be predicted."""

    run: PublishedRun
    step_s: float
    shape: ModelShape
    experts: Experts | None
    dtype: str
    """dtype of matmuls."""
    device: str
    micro_batch: int
    num_micro_batches: int

    @property
    def family(self) -> str:
        """The framework family, which joins all versions."""
        return family(self.run.framework, one_host=(self.run.devices or 1) <= 8)

    @property
    def framework(self) -> str:
        """Who made the code that ran: the family, with both campaigns of vTrain as one."""
        experts = "" if self.experts is None else "-experts"
        return self.family.removesuffix("-host") + experts

    @property
    def pool(self) -> str:
        """Name of the pool of rows fitted together: one framework on similar devices."""
        if self.experts is not None:
            return f"{self.family}-experts"
        if self.family not in _FITTED_BY_DEVICE:
            return self.family
        if self.device.startswith(("b2", "b3", "gb")):
            return f"{self.family}-blackwell"
        by_dtype = f"-{self.dtype}" if self.family == "nemo" else ""
        return f"{self.family}-{self.device}{by_dtype}"

    @property
    def variant(self) -> Variant:
        """Device, dtype and mode, which have their own matmul rate within a family."""
        return Variant(self.device, self.dtype, variation(self.run))

    @property
    def release(self) -> str:
        """The period of the framework's releases, of a mixture of experts on Megatron-Bridge.

        Its releases differ by a third in the speed of experts, and not in that of dense models.
        """
        name, _, rest = self.run.framework.partition(" ")
        if self.experts is None or name.lower() != "megatron-bridge" or not rest.strip():
            return ""
        number = rest.split()[0]
        return "25" if number < "26" else "26.02" if number < "26.06" else "26.06"

    @property
    def overlaps_tensor(self) -> bool:
        """Whether matmuls hide the collectives of tensor parallelism (async TP)."""
        return self.run.overlap == "async TP"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaseGroup:
    """Cases of one device, dtype and kind of block, predicted in one call."""

    framework: str
    variant: Variant
    overlaps_tensor: bool
    network_bytes_per_s: float | None
    """Stated by the source; None for the device's usual network."""
    release: str
    layouts: Layouts
    workload: Workload
    index: npt.NDArray[np.int64]
    """Indices of the group's cases in the original list."""


def predictable(runs: Iterable[PublishedRun]) -> list[Case]:
    """Returns the rows that can be predicted."""
    cases = (_case(run) for run in runs)
    return [case for case in cases if case is not None]


def group_cases(cases: list[Case]) -> list[CaseGroup]:
    """Groups cases that one call to `step_time` can predict."""
    keys: dict[Any, list[int]] = {}
    for number, case in enumerate(cases):
        precision = training_precision(case.run.framework, case.dtype)
        key = (
            *(case.family, formula_of(case.shape), case.experts, case.variant),
            *(precision, case.overlaps_tensor, case.run.network_bytes_per_s, case.release),
        )
        keys.setdefault(key, []).append(number)
    return [_group([cases[number] for number in index], index) for index in keys.values()]


def _case(run: PublishedRun) -> Case | None:
    try:
        return case_of(run)
    except UsageError:
        return None


def case_of(run: PublishedRun) -> Case:
    """Returns a row as the formulas take it; raises with the reason if it cannot be predicted."""
    model, step_s = model_of(run), run.step_s
    context, batch = run.context_length, run.global_batch
    if model is None or step_s is None or run.data is None or context is None or batch is None:
        raise UsageError(
            "cannot be predicted: it needs model, data, context_length, global_batch, and a "
            f"measured time in s/iteration or tokens/s/device, not {run.unit}"
        )
    if run.axes_product != run.devices:
        raise UsageError(
            f"cannot be predicted: data x tensor x pipeline x context is {run.axes_product}, and "
            f"devices is {run.devices}"
        )
    micro_batch = run.micro_batch or framework_settings(run.framework).usual_micro_batch(run)
    passes, left_over = divmod(batch, micro_batch * run.data)
    if left_over or not passes:
        raise UsageError(
            f"cannot be predicted: a global_batch of {batch} is no multiple of "
            f"{run.data} data-parallel ranks x a micro_batch of {micro_batch}"
        )
    return Case(
        run=run,
        step_s=step_s,
        shape=model if isinstance(model, ModelShape) else model.shape(context),
        experts=None if isinstance(model, ModelShape) else model.experts,
        dtype=compute_dtype(run.precision),
        device=device_name(run.device),
        micro_batch=micro_batch,
        num_micro_batches=passes,
    )


def require_possible(case: Case) -> None:
    """Raises for a run that computes faster than its device can.

    Only what a causal mask leaves visible counts, and no recomputation: no run needs fewer FLOPs.
    """
    run = case.run
    assert run.context_length is not None
    assert run.tokens_per_step is not None
    flops = flops_per_token(case.shape, run.context_length, convention="causal").model
    peak = require_device(case.device).peak(case.dtype)
    share = flops * run.tokens_per_step / (case.step_s * (run.devices or 1)) / peak
    if share > 1:
        raise UsageError(
            f"faster than the device: {run.measured:,.6g} {run.unit} are {share:,.0%} of the "
            f"{peak / 1e12:,.0f} TFLOP/s that {case.device} reaches in {case.dtype}; correct "
            "measured, its unit, the device or the batch"
        )


def variation(run: PublishedRun) -> str:
    """Returns the run's non-default mode, or an empty string."""
    if "rowwise" in run.precision:
        return "rowwise scaling"
    return "eager" if run.note == "eager" else ""


def checkpointing(run: PublishedRun) -> int:
    """Returns the run's recomputation mode as its number in `CHECKPOINTING`."""
    recompute = run.recompute or framework_settings(run.framework).recompute
    if recompute in CHECKPOINTING:
        return CHECKPOINTING[recompute]
    return CHECKPOINTING["selective"]


def _group(cases: list[Case], index: list[int]) -> CaseGroup:
    def numbers(*values: int) -> npt.NDArray[np.int64]:
        return np.array(values, dtype=np.int64)

    runs = [case.run for case in cases]
    first = cases[0]
    common = framework_settings(first.run.framework, first.dtype)
    stage = numbers(*(run.zero or 0 for run in runs))
    data = numbers(*(run.data or 1 for run in runs))
    stated = numbers(*(run.shard or run.data or 1 for run in runs))
    shard = np.where(stage > 0, np.minimum(stated, data), 1)
    layouts = Layouts(
        replicate=data // shard,
        shard=shard,
        tensor=numbers(*(run.tensor for run in runs)),
        pipeline=numbers(*(run.pipeline for run in runs)),
        pipeline_interleave=numbers(*(run.interleave for run in runs)),
        context=numbers(*(run.context for run in runs)),
        stage=stage,
        sequence_parallel=np.array([bool(run.sequence_parallel) for run in runs]),
        checkpointing=numbers(*(checkpointing(run) for run in runs)),
        expert=numbers(*(run.expert for run in runs)),
        shards_context=common.shards_context,
    )
    workload = Workload(
        shape=join_shapes([case.shape for case in cases]),
        precision=training_precision(first.run.framework, first.dtype),
        context_length=numbers(*(run.context_length or 1 for run in runs)),  # type: ignore[arg-type]
        micro_batch=numbers(*(case.micro_batch for case in cases)),
        num_micro_batches=numbers(*(case.num_micro_batches for case in cases)),
        experts=first.experts,
        **common.of_steps(),
    )
    return CaseGroup(
        framework=first.framework,
        variant=first.variant,
        overlaps_tensor=first.overlaps_tensor,
        network_bytes_per_s=first.run.network_bytes_per_s,
        release=first.release,
        layouts=layouts,
        workload=workload,
        index=numbers(*index),
    )
