"""Times a step by stopwatch, measures its peak memory, and creates records on this machine.

A GPU runs asynchronously: without waiting for it, a timer measures only the launches. Warm-up keeps
one-time work (allocation, kernel selection, compilation) out of the samples.

The hand-outs require peak memory at three points: after the model is built, before the optimizer
step, and after it. They are taken in a later step, when the optimizer's state exists: in the first
step, activations hide it. On CUDA the allocator tracks the peak. On a CPU it is computed from the
profiler's allocation events; the kernel's count of resident pages is reported separately.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.accounting.intervals import bootstrap_medians
from paceline.core.errors import UsageError
from paceline.core.units import Progress
from paceline.devices import accelerator
from paceline.records import CaseValue, Metric, Record
from paceline.records.environment import Environment, capture_environment
from paceline.records.kinds import PREDICTION, PREDICTS
from paceline.records.schema import Outcome
from paceline.traces.memory import peak_allocations

_BOOTSTRAP_DRAWS = 4000


class Stopwatch:
    """Measures laps that begin and end only when the device is idle."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        accelerator.synchronize(device)
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Returns the seconds since the last lap, or since the stopwatch was created."""
        accelerator.synchronize(self._device)
        now = time.perf_counter()
        elapsed, self._last = now - self._last, now
        return elapsed


def sample(
    run: Callable[[], Mapping[str, float]],
    *,
    warmup: int,
    steps: int,
    time_limit_s: float,
    on_progress: Progress,
) -> dict[str, list[float]]:
    """Runs `warmup` times unmeasured, then up to `steps` times, and returns the laps by name.

    After `time_limit_s`, warm-up ends, and measuring ends after at least one sample.
    """
    deadline = time.monotonic() + time_limit_s
    total = warmup + steps
    for completed in range(warmup):
        if completed and time.monotonic() > deadline:
            break
        run()
        on_progress(completed + 1, total)
    samples: dict[str, list[float]] = {}
    for completed in range(steps):
        for name, seconds in run().items():
            samples.setdefault(name, []).append(seconds)
        on_progress(warmup + completed + 1, total)
        if time.monotonic() > deadline:
            break
    return samples


def ratio_metric(subject: Sequence[float], baseline: Sequence[float]) -> Metric:
    """Returns the ratio of two medians, with a bootstrap interval over paired rounds.

    The samples of one round were taken one after the other, so they are drawn together: a slowdown
    of both is not mistaken for a difference.
    """
    pairs = np.array([subject, baseline])
    medians = bootstrap_medians(pairs, _BOOTSTRAP_DRAWS, np.random.default_rng(0))
    low, high = np.percentile(medians[0] / medians[1], [2.5, 97.5])
    ratio = float(np.median(pairs[0]) / np.median(pairs[1]))
    return Metric(value=ratio, low=min(float(low), ratio), high=max(float(high), ratio))


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes that the tensors occupy, shared storage counted once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors
    }
    return sum(storages.values())


def step_peaks(
    device: torch.device,
    *,
    resident_tensors: Iterable[Tensor],
    phases: dict[str, Callable[[], None]],
) -> dict[str, int]:
    """Runs the phases of one step in order and returns the peak bytes of each.

    `resident_tensors` exist before the step, and the step does not release them.
    """
    if device.type == "cpu":
        resident = storage_bytes(resident_tensors)
        return {name: resident + peak for name, peak in peak_allocations(phases).items()}
    peaks = {}
    for name, run in phases.items():
        accelerator.reset_peak(device)
        run()
        accelerator.synchronize(device)
        peaks[name] = accelerator.peak_allocated_bytes(device)
    return peaks


TORCH_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def resolve_device(name: str) -> torch.device:
    """Returns the device that --device names; raises if it is missing."""
    try:
        return torch.device(accelerator.device_type(name))
    except UsageError as error:
        raise UsageError(f"--device {name}: {error}") from None


def current_environment() -> Environment:
    """Describes this machine, accelerators included."""
    names = ("gloo", "nccl", "mpi", "ucc") if dist.is_available() else ()
    return capture_environment(
        devices=[accelerator.device_name(device) for device in accelerator.all_accelerators()],
        backends=[name for name in names if dist.is_backend_available(name)],
    )


Numbers = Mapping[str, Metric | float | Sequence[float]]
"""Metrics by name: complete, as a single number, or as samples."""


def measured(
    kind: str,
    case: Mapping[str, CaseValue],
    numbers: Numbers,
    *,
    outcome: Outcome = "ok",
    reason: str | None = None,
    warnings: Sequence[str] = (),
) -> Record:
    """Returns a record of the results of a case on this machine."""
    return Record(
        kind=kind,
        case=dict(case),
        environment=current_environment(),
        metrics={name: _metric(number) for name, number in numbers.items()},
        outcome=outcome,
        reason=reason,
        warnings=tuple(warnings),
    )


def predicted(kind: str, case: Mapping[str, CaseValue], numbers: Numbers) -> Record:
    """Returns a record of the predictions for a case of that kind."""
    return measured(PREDICTION, {PREDICTS: kind, **case}, numbers)


def _metric(number: Metric | float | Sequence[float]) -> Metric:
    if isinstance(number, Metric):
        return number
    return Metric.from_samples(number) if isinstance(number, Sequence) else Metric(value=number)
