"""Compares the planner's memory predictions with published peaks.

    python -m studies.planner.memory results/planner-memory.jsonl

Rows with a peak are predicted. If their framework has fitted constants, both are refitted without
the row's model, so that no row is predicted with constants that it helped to fit. Rows without a
peak either ran and must fit their device, or ran out of memory and must not fit. If a row does not
state what was recomputed, full recomputation must fit. Appends `published_memory` records to the
store: one for each row that has a peak, ran out of memory or has a wrong verdict, and one for each
count of verdicts.
"""

import dataclasses
import sys

import numpy as np
import numpy.typing as npt

from paceline.core.errors import HardwareError
from paceline.core.hardware import find_device
from paceline.core.specs import ModelShape
from paceline.core.units import GIB
from paceline.planner.calibrations.cases import Case, group_cases
from paceline.planner.calibrations.framework_settings import compute_dtype, device_name
from paceline.planner.published import PublishedRun, model_of, published_runs
from paceline.predict.cost.framework_memory import (
    GB_OF_NVIDIA_SMI,
    FrameworkMemory,
    find_framework_memory,
    usable_bytes,
)
from paceline.predict.cost.layouts import CHECKPOINTING
from paceline.predict.cost.memory import LayoutMemory, layout_memory
from studies.harness.records import append_record
from studies.harness.study import study_parser

Array = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictedPeak:
    """A published row and its predicted memory."""

    case: Case
    measured: float | None
    predicted: float
    leanest: float
    """Predicted bytes with full recomputation."""
    dynamic: float
    """Predicted bytes of activations and working memory."""
    capacity: float | None

    @property
    def is_stated(self) -> bool:
        """Whether the row states what was recomputed."""
        return self.case.run.recompute is not None and "not stated" not in self.case.run.recompute

    @property
    def verdict(self) -> str:
        """Fits, refused or unknown device; with full recomputation if the row states nothing."""
        if self.capacity is None:
            return "unknown device"
        needed = self.predicted if self.is_stated else self.leanest
        return "refused" if needed > self.capacity else "fits"


def memory_cases() -> list[Case]:
    """Returns the rows with known layout and batch; out-of-memory rows have no step time."""
    return [case for run in published_runs() if (case := _case(run)) is not None]


def _case(run: PublishedRun) -> Case | None:
    model = model_of(run)
    if model is None or run.data is None or run.context_length is None or run.global_batch is None:
        return None
    local = run.global_batch // run.data
    # torchtitan splits a local batch into as many micro-batches as there are stages.
    unstated = local // run.pipeline if run.framework == "torchtitan" else 1
    micro_batch = run.micro_batch or max(unstated, 1)
    if local < micro_batch:
        return None
    return Case(
        run=run,
        step_s=run.step_s or 0.0,
        shape=model if isinstance(model, ModelShape) else model.shape(run.context_length),
        experts=None if isinstance(model, ModelShape) else model.experts,
        dtype=compute_dtype(run.precision),
        device=device_name(run.device),
        micro_batch=micro_batch,
        num_micro_batches=local // micro_batch,
    )


def measured_bytes(run: PublishedRun) -> float | None:
    """Returns a row's peak in bytes, from nvidia-smi's GB or the allocator's GiB."""
    if "memory_gb" in run.also:
        return run.also["memory_gb"] * GB_OF_NVIDIA_SMI
    return run.also["memory_gib"] * GIB if "memory_gib" in run.also else None


def predict_peaks(cases: list[Case]) -> list[PredictedPeak]:
    """Predicts all rows."""
    columns = np.zeros((3, len(cases)))
    for group in group_cases(cases):
        lean = dataclasses.replace(
            group.layouts, checkpointing=np.full(len(group.index), CHECKPOINTING["full"])
        )
        memory = layout_memory(group.layouts, group.workload)
        for row, values in enumerate(
            (memory.total, layout_memory(lean, group.workload).total, _dynamic(memory))
        ):
            columns[row, group.index] = values
    return [
        PredictedPeak(
            case=case,
            measured=measured_bytes(case.run),
            predicted=float(predicted),
            leanest=float(leanest),
            dynamic=float(dynamic),
            capacity=_capacity(case),
        )
        for case, predicted, leanest, dynamic in zip(cases, *columns, strict=True)
    ]


def _dynamic(memory: LayoutMemory) -> Array:
    return np.asarray(memory.activations + memory.working)


def _capacity(case: Case) -> float | None:
    try:
        return usable_bytes(find_device(case.device))
    except HardwareError:
        return None


def fit_constants(peaks: list[PredictedPeak]) -> tuple[float, float]:
    """Fits the constant and the gaps of one framework to its peaks, by relative error."""
    memories = [_memory(peak) for peak in peaks]
    measured = np.array([peak.measured for peak in peaks])
    basis = _basis(peaks)
    now = np.array([[memory.constant_bytes, memory.gaps] for memory in memories])
    without = np.array([peak.predicted for peak in peaks]) - (basis * now).sum(axis=1)
    solved, *_ = np.linalg.lstsq(
        basis / measured[:, None], (measured - without) / measured, rcond=None
    )
    return float(solved[0]), float(solved[1])


def _memory(peak: PredictedPeak) -> FrameworkMemory:
    return find_framework_memory(peak.case.family, peak.case.dtype)


def _basis(peaks: list[PredictedPeak]) -> Array:
    capped = [min(peak.dynamic, _memory(peak).most_with_gaps) for peak in peaks]
    return np.stack([np.ones(len(peaks)), capped], axis=1)


def held_out(peaks: list[PredictedPeak]) -> list[PredictedPeak]:
    """Predicts each row with constants fitted without its model, if its framework has any."""
    known = [peak for peak in peaks if peak.measured is not None]
    found = []
    for peak in peaks:
        memory = _memory(peak)
        if memory.gaps:
            others = [
                other
                for other in known
                if other.case.family == peak.case.family
                and other.case.run.model != peak.case.run.model
            ]
            constant, gaps = fit_constants(others)
            capped = min(peak.dynamic, memory.most_with_gaps)
            shift = constant - memory.constant_bytes + (gaps - memory.gaps) * capped
            peak = dataclasses.replace(
                peak, predicted=peak.predicted + shift, leanest=peak.leanest + shift
            )
        found.append(peak)
    return found


def main() -> int:
    """Predicts all rows, and records the comparisons and the counts of verdicts."""
    store = study_parser(__doc__).parse_args().store
    peaks = predict_peaks(memory_cases())
    bloom = [peak for peak in peaks if peak.case.family == "bloom" and peak.measured is not None]
    constant, gaps = fit_constants(bloom)
    print(f"BLOOM's constants, all rows: {constant / 1e9:.2f} GB, gaps {gaps:.3f}")
    counts: dict[tuple[str, str, str], int] = {}
    for peak in held_out(peaks):
        run = peak.case.run
        outcome = "out of memory" if run.unit == "OOM" else "ran"
        framework = peak.case.framework if peak.case.experts is not None else peak.case.family
        key = (framework, outcome, peak.verdict)
        counts[key] = counts.get(key, 0) + 1
        is_unexpected = peak.verdict == ("fits" if run.unit == "OOM" else "refused")
        if peak.measured is None and run.unit != "OOM" and not is_unexpected:
            continue
        metrics = {"predicted_bytes": peak.predicted}
        if peak.measured is not None:
            metrics["peak_bytes"] = peak.measured
        if peak.capacity is not None:
            metrics["capacity_bytes"] = peak.capacity
        case = {
            "run": run.id,
            "framework": framework,
            "model": run.model,
            "outcome": outcome,
            "verdict": peak.verdict,
        }
        append_record(store, "published_memory", case, metrics)
    for (family, outcome, verdict), number in sorted(counts.items()):
        case = {
            "run": f"all that {outcome}",
            "framework": family,
            "outcome": outcome,
            "verdict": verdict,
        }
        append_record(store, "published_memory", case, {"rows": number})
        print(f"{family}: {number} {outcome}, {verdict}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
