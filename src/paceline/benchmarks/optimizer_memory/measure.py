"""The memory of a training step by what it holds, and the time of steps, under one strategy.

Phases on every rank: what the strategy before has left is released; model, container and optimizer
are made; a few steps settle what they allocate once; in a few steps more every allocation is
followed; then steps are timed with nothing following them.

Three instants, as the hand-outs ask. After init, what exists when all is made. Before the step,
the most that forward and backward took. After the step, the most that the optimizer took. Of that,
parameters, gradients and optimizer state are counted from their tensors; buffers are what else
exists when backward is over: the model's tables, the batch, what a container keeps. Activations are
the rest of the peak. On several ranks, an instant is that of the rank with the highest peak, so
that its parts add up.

On CUDA the allocator knows what exists. On a CPU, what exists are the tensors that Python sees,
and how much a phase adds to them at most is told by the profiler's allocation events. Those miss
the release of a tensor that a thread of gloo was the last to hold, so that a peak may come out too
high, never too low: it is the lowest of the followed steps.
"""

import ctypes
import dataclasses
import gc
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parallel import DistributedDataParallel

from paceline.accounting.memory.step import INSTANTS, MemoryParts
from paceline.benchmarks.harness.memory import step_peaks, storage_bytes
from paceline.benchmarks.optimizer_memory.config import OptimizerCase
from paceline.benchmarks.strategies.step import StrategyStep
from paceline.core.host_memory import reset_resident_peak, resident_peak_bytes
from paceline.parallel.buckets import local_tensor
from paceline.parallel.ranks.collectives import reduce_numbers

STEP = "step_time_s"
OPTIMIZER = "optimizer_time_s"

# Containers make their buckets in the first step or anew after it, and optimizers their state.
_SETTLING_STEPS = 3
_FOLLOWED_STEPS = 3
_LETTING_GO_S = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerResult:
    """What all ranks agree on about one strategy."""

    samples: dict[str, list[float]]
    memory: dict[str, MemoryParts]
    """Parts of the memory at each instant."""
    resident_bytes: dict[str, int]
    """The most that a process had resident at each instant, tensors or not, by metric."""


def named_bytes(step: StrategyStep) -> dict[str, int]:
    """Returns what a rank's parameters, gradients and optimizer state occupy now."""
    return {
        "parameters": storage_bytes(step.parameters()),
        "gradients": storage_bytes(step.gradients()),
        "optimizer_state": storage_bytes(step.optimizer_state()),
    }


class OptimizerMeasurement:
    """One strategy on one rank: its memory, and then its times."""

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
            # It keeps its buckets where Python does not see them, but for the gradients in them.
            self.step.forward_and_backward()
            self._hidden = self.step.gradients()
            self.step.optimizer_step()
            if device.type != "cuda":
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
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        # A thread of gloo lets go of a message some time after others have waited for it.
        time.sleep(_LETTING_GO_S)
        return storage_bytes(_visible(self.device)) - self._foreign

    def _follow(self) -> dict[str, MemoryParts]:
        """Runs one step and returns its memory at the two instants that it has."""
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
        foreign = 0 if self.device.type == "cuda" else self._foreign
        return {
            "before_step": _parts(named, existing=existing, peak=peaks["before_step"] - foreign),
            # What a release that was missed has left is in both peaks.
            "after_step": _parts(
                named, existing=existing, peak=existing + peaks["after_step"] - peaks["between"]
            ),
        }

    def time_steps(self, *, warmup: int, steps: int, time_limit_s: float) -> None:
        """Times steps that follow each other at once, as in training.

        What a step leaves in flight, such as parameters for the next forward pass, is waited for
        in the next one: a pause between the two would hide it.
        """
        dist.barrier()
        began = time.perf_counter()
        for _ in range(warmup):
            self.step.run()
        (elapsed_s,) = self._largest([time.perf_counter() - began])
        # Agreed on before: to ask the others after each step would be a pause.
        affordable = int((time_limit_s - elapsed_s) / (elapsed_s / warmup))
        for _ in range(max(1, min(steps, affordable))):
            laps = self.step.run()
            for name in (STEP, OPTIMIZER):
                self.samples.setdefault(name, []).append(laps[name])

    def result(self) -> OptimizerResult:
        """Takes the resident memory of one step more, and joins what the ranks have measured."""
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
        """Returns the parts of the rank that holds most."""
        of_ranks: list[MemoryParts] = [parts] * dist.get_world_size()
        dist.all_gather_object(of_ranks, parts)
        return max(of_ranks, key=lambda one: one.total)


def _parts(named: dict[str, int], *, existing: int, peak: int) -> MemoryParts:
    return MemoryParts(**named, buffers=existing - sum(named.values()), activations=peak - existing)


def _visible(device: torch.device) -> list[Tensor]:
    """Returns all tensors on a device that Python sees, as what this rank holds of them."""
    # By type: an object may pretend to be of another class, and do work to find out. What a
    # compiler has left of itself looks like tensors, but holds no memory.
    tensors = [
        item
        for item in gc.get_objects()
        if issubclass(type(item), Tensor) and not issubclass(type(item), FakeTensor)
    ]
    local = map(local_tensor, tensors)
    return [tensor for tensor in local if tensor.device.type == device.type]


def measure(device: torch.device, case: OptimizerCase, time_limit_s: float) -> OptimizerResult:
    """Measures one strategy on this rank, and leaves nothing of it; all ranks call it."""
    _release(device)
    measurement = OptimizerMeasurement(case, device)
    step = case.step
    measurement.time_steps(warmup=step.warmup, steps=step.steps, time_limit_s=time_limit_s)
    result = measurement.result()
    del measurement
    _release(device)
    return result


def _release(device: torch.device) -> None:
    """Lets go of what nobody refers to but itself, as containers do."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    # glibc keeps what was released for later; the next strategy's resident memory would show it.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
