"""Measures the memory of a training step by category, and step times, under one strategy.

Phases on every rank: release what is left of the previous strategy; build model, container and
optimizer; run a few steps, until one-time allocations are done; run a few more steps and track
every allocation; then time steps without tracking.

The hand-outs require three instants. After init: the memory that exists once everything is built.
Before the step: the peak of forward and backward. After the step: the peak of the optimizer. Of
that, parameters, gradients and optimizer state are counted from their tensors. Buffers are
everything else that exists after backward: the model's tables, the batch, a container's buffers.
Activations are the rest of the peak. On several ranks, an instant is that of the rank with the
highest peak, so that its parts add up.

On CUDA the allocator reports the memory that exists. On a CPU, it is the memory of the tensors that
Python sees, and the profiler's allocation events show how much a phase adds to it at most. The
events miss the release of a tensor that a gloo thread was the last to hold. A peak may therefore be
too high, but never too low, and the lowest of the tracked steps is reported.
"""

import ctypes
import dataclasses
import gc
import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parallel import DistributedDataParallel

from paceline.accounting.memory.step import INSTANTS, MemoryParts, step_memory
from paceline.benchmarks.config import OptimizerCase, OptimizerSweep
from paceline.benchmarks.harness.measure import (
    Numbers,
    measured,
    predicted,
    resolve_device,
    step_peaks,
    storage_bytes,
)
from paceline.benchmarks.harness.ranks import BUILDING_S, MeasuringRanks, sweep_ranks
from paceline.benchmarks.strategies import StrategyStep, memory_obstacle, strategy_case_fields
from paceline.core.host import reset_resident_peak, resident_peak_bytes
from paceline.core.specs import precision_preset
from paceline.core.strategies import DEFAULT_BUCKET_SIZE_MB
from paceline.core.units import Progress
from paceline.devices import accelerator
from paceline.kernels import resolve_implementation
from paceline.parallel.dtensor import local_tensor
from paceline.parallel.ranks.collectives import reduce_numbers
from paceline.records import Record

STEP = "step_time_s"
OPTIMIZER = "optimizer_time_s"

# Containers build buckets in the first step or rebuild them after it; optimizers build state.
_SETTLING_STEPS = 3
_FOLLOWED_STEPS = 3
_LETTING_GO_S = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerResult:
    """Results of one strategy, identical on all ranks."""

    samples: dict[str, list[float]]
    memory: dict[str, MemoryParts]
    """Parts of the memory at each instant."""
    resident_bytes: dict[str, int]
    """Peak resident memory of a process at each instant, tensors or not, by metric."""


def named_bytes(step: StrategyStep) -> dict[str, int]:
    """Returns the current bytes of a rank's parameters, gradients and optimizer state."""
    return {
        "parameters": storage_bytes(step.parameters()),
        "gradients": storage_bytes(step.gradients()),
        "optimizer_state": storage_bytes(step.optimizer_state()),
    }


class OptimizerMeasurement:
    """Measures one strategy on one rank: first its memory, then its times."""

    def __init__(self, case: OptimizerCase, device: torch.device) -> None:
        self.device = device
        self.samples: dict[str, list[float]] = {}
        reset_resident_peak()
        self._foreign = storage_bytes(_visible(device))
        self.step = StrategyStep(case.step, case.variant, device)
        self._resident = {"resident_peak_after_init_bytes": resident_peak_bytes()}
        self._hidden: list[Tensor] = []
        named_at_first, at_first = named_bytes(self.step), self._existing_bytes()
        for _ in range(_SETTLING_STEPS):
            self.step.run()
        if isinstance(self.step.model, DistributedDataParallel):
            # Python does not see its buckets, except for the gradients in them.
            self.step.forward_and_backward()
            self._hidden = self.step.gradients()
            self.step.optimizer_step()
            if device.type == "cpu":
                at_first += storage_bytes(self._hidden)
        followed = [self._follow() for _ in range(_FOLLOWED_STEPS)]
        self._memory = {
            "after_init": _parts(named_at_first, existing=at_first, peak=at_first),
            **{
                instant: min((step[instant] for step in followed), key=lambda parts: parts.total)
                for instant in INSTANTS[1:]
            },
        }

    def _existing_bytes(self) -> int:
        if self.device.type != "cpu":
            return accelerator.allocated_bytes(self.device)
        # A gloo thread releases a message some time after the wait for it has returned.
        time.sleep(_LETTING_GO_S)
        return storage_bytes(_visible(self.device)) - self._foreign

    def _follow(self) -> dict[str, MemoryParts]:
        """Runs one step and returns its memory before and after the optimizer step."""
        named: dict[str, int] = {}
        existing = 0

        def forward_and_backward() -> None:
            nonlocal named, existing
            self.step.forward_and_backward()
            named, existing = named_bytes(self.step), self._existing_bytes()

        peaks = step_peaks(
            self.device,
            resident_tensors=_visible(self.device),
            phases={
                "before_step": forward_and_backward,
                "between": lambda: None,
                "after_step": self.step.optimizer_step,
            },
        )
        foreign = self._foreign if self.device.type == "cpu" else 0
        return {
            "before_step": _parts(named, existing=existing, peak=peaks["before_step"] - foreign),
            # The memory of a missed release is in both peaks, and cancels out.
            "after_step": _parts(
                named, existing=existing, peak=existing + peaks["after_step"] - peaks["between"]
            ),
        }

    def time_steps(self, *, warmup: int, steps: int, time_limit_s: float) -> None:
        """Times consecutive steps without pauses, as in training.

        A step may leave messages in flight, such as parameters for the next forward pass, and the
        next step waits for them. A pause between the two would hide that wait.
        """
        dist.barrier()
        began = time.perf_counter()
        for _ in range(warmup):
            self.step.run()
        (elapsed_s,) = self._largest([time.perf_counter() - began])
        # The ranks agree in advance: agreeing after each step would be a pause.
        affordable = int((time_limit_s - elapsed_s) / (elapsed_s / warmup))
        for _ in range(max(1, min(steps, affordable))):
            laps = self.step.run()
            for name in (STEP, OPTIMIZER):
                self.samples.setdefault(name, []).append(laps[name])

    def result(self) -> OptimizerResult:
        """Measures the resident memory of one more step, and combines the results of all ranks."""
        for instant, run in (
            ("before_step", self.step.forward_and_backward),
            ("after_step", self.step.optimizer_step),
        ):
            reset_resident_peak()
            run()
            self._resident[f"resident_peak_{instant}_bytes"] = resident_peak_bytes()
        largest = self._largest(list(self._resident.values()))
        return OptimizerResult(
            samples={name: self._largest(values) for name, values in self.samples.items()},
            memory={instant: self._highest(parts) for instant, parts in self._memory.items()},
            resident_bytes=dict(zip(self._resident, map(int, largest), strict=True)),
        )

    def _largest(self, numbers: Sequence[float]) -> list[float]:
        return reduce_numbers(numbers, dist.ReduceOp.MAX, self.device)

    def _highest(self, parts: MemoryParts) -> MemoryParts:
        """Returns the parts of the fullest rank."""
        of_ranks: list[MemoryParts] = [parts] * dist.get_world_size()
        dist.all_gather_object(of_ranks, parts)
        return max(of_ranks, key=lambda one: one.total)


def _parts(named: dict[str, int], *, existing: int, peak: int) -> MemoryParts:
    return MemoryParts(**named, buffers=existing - sum(named.values()), activations=peak - existing)


def _visible(device: torch.device) -> list[Tensor]:
    """Returns this rank's part of all tensors on a device that Python sees."""
    # By type, because isinstance may run code of objects that pretend to be of another class. Fake
    # tensors, which a compiler leaves behind, hold no memory.
    tensors = [
        item
        for item in gc.get_objects()
        if issubclass(type(item), Tensor) and not issubclass(type(item), FakeTensor)
    ]
    local = map(local_tensor, tensors)
    return [tensor for tensor in local if tensor.device.type == device.type]


def measure(device: torch.device, case: OptimizerCase, time_limit_s: float) -> OptimizerResult:
    """Measures one strategy on this rank, and releases all of it; all ranks call it."""
    _release(device)
    measurement = OptimizerMeasurement(case, device)
    step = case.step
    measurement.time_steps(warmup=step.warmup, steps=step.sweep.steps, time_limit_s=time_limit_s)
    result = measurement.result()
    del measurement
    _release(device)
    return result


def _release(device: torch.device) -> None:
    """Frees reference cycles, which containers have, and cached memory."""
    gc.collect()
    accelerator.free_cached_memory(device)
    # glibc keeps freed memory, which would count as resident memory of the next strategy.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def optimizer_records(sweep: OptimizerSweep, _on_progress: Progress) -> Iterator[Record]:
    """Measures every model under every strategy; yields records on rank 0 only."""
    for ranks in sweep_ranks(sweep, grace_s=sweep.time_limit_s + BUILDING_S):
        for case in sweep.cases():
            yield from ranks.on_first(_records_of(sweep, case, ranks))


def _records_of(
    sweep: OptimizerSweep, case: OptimizerCase, ranks: MeasuringRanks
) -> Iterator[Record]:
    obstacle = memory_obstacle(ranks, case.step, [case.variant.strategy])
    result: OptimizerResult | None
    result, outcome, reason = ranks.attempt(
        lambda: ranks.run(measure, case, sweep.time_limit_s), obstacle
    )
    numbers: Numbers = {}
    if result is not None:
        numbers = {**result.samples, **_memory_numbers(result.memory), **result.resident_bytes}
    fields = strategy_case_fields(case.step, case.variant, ranks)
    yield measured("optimizer", fields, numbers, outcome=outcome, reason=reason)
    expected = _predict(case, ranks.world_size)
    if expected is not None:
        yield predicted("optimizer", fields, expected)


def _memory_numbers(instants: dict[str, MemoryParts]) -> Numbers:
    numbers: dict[str, float] = {}
    for instant, parts in instants.items():
        for name, value in dataclasses.asdict(parts).items():
            numbers[f"{instant}_{name}_bytes"] = value
        numbers[f"peak_{instant}_bytes"] = parts.total
    return numbers


def _predict(case: OptimizerCase, world_size: int) -> Numbers | None:
    """Returns the predictions of the formulas, or None unless the step is eager and on a CPU."""
    sweep = case.step.sweep
    if sweep.compilation != "none" or resolve_device(sweep.device).type != "cpu":
        return None
    size = case.variant.bucket_size_mb
    return _memory_numbers(
        step_memory(
            case.step.shape,
            case.step.batch,
            precision_preset(case.step.precision),
            case.variant.strategy,
            world_size,
            activation_checkpointing=sweep.activation_checkpointing,
            attention=resolve_implementation(sweep.attention, "cpu"),
            bucket_size_mb=size if isinstance(size, float) else DEFAULT_BUCKET_SIZE_MB,
        )
    )
