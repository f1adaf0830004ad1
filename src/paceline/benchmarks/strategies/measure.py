"""Training steps under several strategies, interleaved on the same ranks.

Every strategy gets its own model, from the same seed, and every rank its own batch. Before a step
the ranks synchronize in an untimed barrier. A step is cut where no message is in flight: it begins
with the optimizer, which uses the gradients of the previous step, so that parameters sent during
forward count towards the same step. After the rounds, each strategy's gradients are sent again with
nothing else running, which is its communication time.

A step's time is that of the slowest rank. Its exposed communication is that of the rank that waits
least after its last gradient: the others also wait for that rank to compute.
"""

import dataclasses
import time

import torch
import torch.distributed as dist
from torch import nn

from paceline.benchmarks.harness.memory import step_peaks, storage_bytes
from paceline.benchmarks.harness.turns import Turns, hold
from paceline.benchmarks.strategies.config import DataParallelCase, Variant
from paceline.benchmarks.strategies.step import StrategyStep
from paceline.core.ranges import step_range
from paceline.core.strategies import SHARDED_PARAMETERS
from paceline.kernels.named_range import named_range
from paceline.parallel.ddp.bucket_size import BucketSizeChoice
from paceline.parallel.ddp.containers import BucketedDataParallel
from paceline.parallel.fsdp.container import FullyShardedDataParallel
from paceline.parallel.ranks.collectives import reduce_numbers, reduce_scatter_single
from paceline.parallel.ranks.device_clock import Moment, now, seconds_between, synchronize
from paceline.parallel.ranks.reduce_scatter import ReduceScatter, start_reduce_scatter
from paceline.parallel.reducer.hooks import when_complete
from paceline.parallel.strategies import message_sizes
from paceline.parallel.zero.container import ShardedDataParallel

STEP = "step_time_s"
EXPOSED = "exposed_communication_s"
COMMUNICATION = "communication_s"

_BARE_REPETITIONS = 5


class DataParallelStep(StrategyStep):
    """A training step that also measures its wait for communication after backward."""

    def __init__(self, case: DataParallelCase, variant: Variant, device: torch.device) -> None:
        self._last_gradient: Moment | None = None
        super().__init__(case.step, variant, device)
        self.forward_and_backward()
        self.range_name = step_range(variant.label)

    def wrap(self, module: nn.Module, variant: Variant) -> nn.Module:
        """Applies the strategy to the model, and registers hooks on its gradients."""
        # Registered before any strategy's hooks, so that it records when the gradient is ready.
        for parameter in module.parameters():
            when_complete(parameter, self, DataParallelStep.note_gradient)
        return super().wrap(module, variant)

    def note_gradient(self) -> None:
        """Records when a gradient is complete."""
        self._last_gradient = now(self.device)

    def run(self) -> dict[str, float]:
        """Runs one step on this rank; the ranks start together."""
        self._last_gradient = None
        dist.barrier()
        synchronize(self.device)
        with named_range(self.range_name):
            return self._run()

    def _run(self) -> dict[str, float]:
        moments = [now(self.device)]
        self.optimizer_step()
        moments.append(now(self.device))
        loss = self.forward()
        moments.append(now(self.device))
        self.backward(loss)
        if isinstance(self.model, ShardedDataParallel):
            # Parameters are in flight here only if the optimizer steps in backward.
            self.model.wait_for_parameters()
        moments.append(now(self.device))
        synchronize(self.device)
        names = ("optimizer_time_s", "forward_time_s", "backward_time_s")
        laps = {
            name: seconds_between(start, end)
            for name, start, end in zip(names, moments[:-1], moments[1:], strict=True)
        }
        # Parameters that are gathered only for use trigger no gradient hooks.
        if self._last_gradient is not None:
            laps[EXPOSED] = seconds_between(self._last_gradient, moments[-1])
            laps["backward_time_s"] -= laps[EXPOSED]
        return laps | {STEP: seconds_between(moments[0], moments[-1])}

    def memory(self) -> dict[str, int]:
        """Returns the bytes of gradients after backward, and the peak of forward and backward."""
        gradients = self.gradients()
        gradient_bytes = storage_bytes(gradients)
        self.optimizer_step()
        # Every other strategy keeps its buffers from step to step.
        kept = [] if self.strategy in ("none", *SHARDED_PARAMETERS) else gradients
        del gradients
        peaks = step_peaks(
            self.device,
            resident_tensors=[*self.resident_tensors(), *kept],
            phases={"step": self.forward_and_backward},
        )
        return {"gradient_bytes": gradient_bytes, "peak_before_optimizer_bytes": peaks["step"]}

    def time_communication(self) -> float:
        """Returns the seconds of the last step's messages with nothing else running."""
        num_ranks = dist.get_world_size()
        # Rounded up to a multiple of the ranks: a reduce-scatter gives each the same amount.
        lengths = [-(-size // (4 * num_ranks)) * num_ranks for size in message_sizes(self.model)]
        messages = [torch.zeros(length, device=self.device) for length in lengths]
        dist.barrier()
        synchronize(self.device)
        began = time.perf_counter()
        works: list[dist.Work | ReduceScatter] = []
        for message in messages:
            if isinstance(self.model, (ShardedDataParallel, FullyShardedDataParallel)):
                works.append(start_reduce_scatter(message, self.model.process_group))
                continue
            if self.strategy == "torch_fsdp2":
                own = torch.empty(message.numel() // num_ranks, device=self.device)
                reduce_scatter_single(own, message)
                continue
            work = dist.all_reduce(message, async_op=True)
            assert work is not None
            if self.strategy == "naive":
                work.wait()
            works.append(work)
        for work in works:
            work.wait()
        synchronize(self.device)
        return time.perf_counter() - began


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariantResult:
    """Results of one strategy, identical on all ranks."""

    samples: dict[str, list[float]]
    memory: dict[str, int]
    num_messages: int
    choice: BucketSizeChoice | None
    """An automatic bucket size, and the data that it is based on."""


class Comparison(Turns):
    """All strategies of one case on one rank."""

    def __init__(self, case: DataParallelCase, device: torch.device) -> None:
        self.steps = [DataParallelStep(case, variant, device) for variant in case.variants]
        super().__init__(self.steps, device)

    def results(self) -> list[VariantResult]:
        """Times communication, measures memory, and combines the measurements of all ranks."""
        return list(map(self._result, self.steps, self.samples))

    def _result(self, step: DataParallelStep, samples: dict[str, list[float]]) -> VariantResult:
        if message_sizes(step.model):
            samples[COMMUNICATION] = [step.time_communication() for _ in range(_BARE_REPETITIONS)]
        joined = {}
        for name, values in samples.items():
            chosen = dist.ReduceOp.MIN if name == EXPOSED else dist.ReduceOp.MAX
            joined[name] = reduce_numbers(values, chosen, self.device)
        model = step.model
        return VariantResult(
            samples=joined,
            memory=step.memory(),
            num_messages=len(message_sizes(model)),
            choice=model.bucket_size_choice if isinstance(model, BucketedDataParallel) else None,
        )


def prepare(device: torch.device, case: DataParallelCase) -> None:
    """Builds all strategies of a case on this rank."""
    hold(lambda: Comparison(case, device))
