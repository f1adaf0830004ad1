"""Training steps under several strategies, interleaved on the same ranks.

Every strategy gets its own model, from the same seed, and every rank its own batch. Before a step
the ranks synchronize in an untimed barrier. A step is cut where no message is in flight: it begins
with the optimizer, which uses the gradients of the previous step, so that parameters sent during
forward count towards the same step. After the rounds, each strategy's gradients are sent again with
nothing else running, which is its communication time.

A step's time is that of the slowest rank. Its exposed communication is that of the rank that waits
least after its last gradient: the others also wait for that rank to compute.

Before the kernel kills a rank, the ranks' memory is checked against a lower bound: parameters,
gradients and optimizer state of all strategies that are held at the same time. If the bound does
not fit, the case cannot run. If it fits, the case may still run out of memory for activations.
"""

import dataclasses
import logging
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.accounting.memory.model_states import rank_state_bytes
from paceline.benchmarks.config import DataParallelCase, DataParallelSweep, StepCase, Variant
from paceline.benchmarks.harness.measure import (
    Numbers,
    measured,
    predicted,
    ratio_metric,
    resolve_device,
    step_peaks,
    storage_bytes,
)
from paceline.benchmarks.harness.ranks import (
    InterleavedBenchmark,
    MeasuringRanks,
    measure_rounds,
    sweep_ranks,
)
from paceline.benchmarks.step import LEARNING_RATE, TimedStep, step_case_fields
from paceline.core.ranges import step_range
from paceline.core.specs import precision_preset
from paceline.core.strategies import SHARDED_PARAMETERS, StrategyName
from paceline.core.units import Progress, format_binary_bytes
from paceline.devices.accelerator import Moment, now, seconds_between, synchronize
from paceline.devices.hardware import describe_hardware, usable_memory_bytes
from paceline.devices.named_range import named_range
from paceline.models import TransformerLM
from paceline.parallel.bucket_size import BucketSizeChoice
from paceline.parallel.ddp import BucketedDataParallel
from paceline.parallel.dtensor import local_tensor
from paceline.parallel.fsdp.container import FullyShardedDataParallel
from paceline.parallel.ranks.collectives import (
    ReduceScatter,
    reduce_numbers,
    reduce_scatter_single,
    start_reduce_scatter,
)
from paceline.parallel.reducer import when_complete
from paceline.parallel.strategies import apply_strategy, make_optimizer, message_sizes
from paceline.parallel.zero.container import ShardedDataParallel
from paceline.parallel.zero.optimizer import ShardedOptimizer, state_tensors
from paceline.records import CaseValue, Metric, Record
from paceline.records.kinds import COMPRESSION
from paceline.records.links import link_case_fields


class StrategyStep(TimedStep):
    """A step on one of several ranks; its tensors are this rank's parts."""

    def __init__(self, case: StepCase, variant: Variant, device: torch.device) -> None:
        self.strategy = variant.strategy
        self._bucket_size_mb = variant.bucket_size_mb
        self.compression = variant.compression
        self.data_seed = dist.get_rank() + 1
        super().__init__(case, device)

    def wrap(self, model: TransformerLM) -> nn.Module:
        """Applies the strategy to the model."""
        return apply_strategy(self.strategy, model, self._bucket_size_mb, self.compression)

    def make_optimizer(self) -> Optimizer:
        """Creates the strategy's optimizer."""
        adamw = torch.optim.AdamW
        return make_optimizer(self.strategy, self.model, adamw, lr=LEARNING_RATE, fused=True)

    def parameters(self) -> list[Tensor]:
        """Returns the parameters that this rank holds."""
        return [local_tensor(parameter) for parameter in super().parameters()]

    def gradients(self) -> list[Tensor]:
        """Returns the gradients that this rank holds now."""
        gradients = super().gradients()
        if isinstance(self.optimizer, ShardedOptimizer):
            gradients += self.optimizer.gradient_tensors()
        return [local_tensor(gradient) for gradient in gradients]

    def optimizer_state(self) -> list[Tensor]:
        """Returns the tensors that this rank's optimizer keeps from step to step."""
        return state_tensors(self.optimizer)


def strategy_case_fields(
    case: StepCase, variant: Variant, ranks: MeasuringRanks
) -> dict[str, CaseValue]:
    """Returns the case fields of the record of a step under a strategy."""
    step = step_case_fields(case, describe_hardware(resolve_device(case.sweep.device)))
    del step["phase"]
    compression = {} if variant.compression == "none" else {COMPRESSION: variant.compression}
    return {
        "strategy": variant.strategy,
        "bucket_size_mb": variant.bucket_size_mb,
        **compression,
        **step,
        **ranks.topology,
        "optimizer": "adamw-fused",
    }


_logger = logging.getLogger(__name__)

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

    def wrap(self, model: TransformerLM) -> nn.Module:
        """Applies the strategy to the model, and registers hooks on its gradients."""
        # Registered before any strategy's hooks, so that it records when the gradient is ready.
        for parameter in model.parameters():
            when_complete(parameter, self.note_gradient)
        return super().wrap(model)

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


class StrategyComparison(InterleavedBenchmark):
    """All strategies of one case on one rank."""

    def __init__(self, case: DataParallelCase, device: torch.device) -> None:
        self.steps = [DataParallelStep(case, variant, device) for variant in case.variants]
        super().__init__(self.steps, device)

    def results(self) -> list[VariantResult]:
        """Times communication, measures memory, and combines the measurements of all ranks."""
        return list(map(self._result, self.steps, self.samples))

    def _result(self, step: DataParallelStep, samples: dict[str, list[float]]) -> VariantResult:
        # Torch does not report the sizes of messages that its communication hooks send.
        has_hook = step.strategy == "torch_ddp" and step.compression != "none"
        if message_sizes(step.model) and not has_hook:
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


def memory_obstacle(
    ranks: MeasuringRanks, case: StepCase, strategies: Sequence[StrategyName]
) -> str | None:
    """Returns why these strategies cannot fit at the same time; None if they may.

    Every rank must call it, and all get the same answer.
    """
    usable: int | None = ranks.run(least_usable_bytes)
    needed = _needed_bytes(ranks, case, strategies)
    if usable is None or needed <= usable:
        return None
    shared = "a device" if ranks.topology["device"] != "cpu" else "the ranks of a host"
    return (
        f"{shared} would need at least {format_binary_bytes(needed)}, but only "
        f"{format_binary_bytes(usable)} may be used; use a smaller --model or fewer --strategies"
    )


def least_usable_bytes(device: torch.device) -> int | None:
    """Returns the least usable memory of any rank; None if it is unknown on some rank."""
    usable = usable_memory_bytes(device)
    least = torch.tensor(-1 if usable is None else usable, dtype=torch.int64, device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return None if least.item() < 0 else int(least.item())


def _needed_bytes(ranks: MeasuringRanks, case: StepCase, strategies: Sequence[StrategyName]) -> int:
    """Returns a lower bound for the fullest GPU, or for the fullest host."""
    by_rank = np.zeros(ranks.world_size, dtype=np.int64)
    for strategy in strategies:
        precision = precision_preset(case.precision)
        states = rank_state_bytes(case.shape, precision, strategy, ranks.world_size)
        by_rank += states.parameters + states.gradients + states.optimizer_state
    if ranks.topology["device"] != "cpu":
        return int(by_rank.max())
    # The lab's hosts are virtual and share one memory; of real hosts, one has at least the mean.
    num_hosts = 1 if link_case_fields() else int(ranks.topology["num_hosts"] or 1)
    return int(by_rank.sum()) // num_hosts


def data_parallel_records(sweep: DataParallelSweep, on_progress: Progress) -> Iterator[Record]:
    """Measures every model under all strategies; yields records on rank 0 only."""
    for ranks in sweep_ranks(sweep):
        for case in sweep.cases():
            yield from ranks.on_first(_records_of(sweep, case, ranks, on_progress))


def _records_of(
    sweep: DataParallelSweep, case: DataParallelCase, ranks: MeasuringRanks, on_progress: Progress
) -> Iterator[Record]:
    obstacle = memory_obstacle(ranks, case.step, [variant.strategy for variant in case.variants])
    results, outcome, reason = ranks.attempt(
        lambda: _measure(sweep, case, ranks, on_progress), obstacle
    )
    for index, variant in enumerate(case.variants):
        yield measured(
            "ddp",
            case_fields(case, variant, ranks),
            {} if results is None else _numbers(results[index], results[0]),
            outcome=outcome,
            reason=reason,
        )
        if results is not None:
            yield from _predictions(case, variant, results[index], ranks)


def _predictions(
    case: DataParallelCase, variant: Variant, result: VariantResult, ranks: MeasuringRanks
) -> Iterator[Record]:
    """Yields the predictions of an automatic choice for every bucket size."""
    choice = result.choice
    if choice is None:
        return
    for size, candidate in choice.candidates.items():
        numbers = {
            EXPOSED: candidate.exposed_s,
            "num_messages": candidate.num_buckets,
            "gradient_bytes": result.memory["gradient_bytes"],
            "latency_s": choice.latency_s,
            "algorithm_bandwidth_bytes_per_s": choice.bytes_per_s,
        }
        yield predicted(
            "ddp",
            case_fields(case, dataclasses.replace(variant, bucket_size_mb=size), ranks),
            {name: number for name, number in numbers.items() if number is not None},
        )


def _measure(
    sweep: DataParallelSweep, case: DataParallelCase, ranks: MeasuringRanks, on_progress: Progress
) -> list[VariantResult]:
    results: list[VariantResult]
    results = measure_rounds(ranks, StrategyComparison, case, sweep, on_progress)
    for variant, result in zip(case.variants, results, strict=True):
        if result.choice is not None and ranks.is_first:
            _logger.info("%s: %s", variant.label, result.choice.explain())
    return results


def _numbers(result: VariantResult, baseline: VariantResult) -> Numbers:
    numbers: dict[str, Metric | float | list[float]] = {**result.samples, **result.memory}
    numbers["num_messages"] = result.num_messages
    if result is not baseline:
        numbers["step_time_ratio"] = ratio_metric(result.samples[STEP], baseline.samples[STEP])
    if result.choice is not None:
        numbers["chosen_bucket_size_mb"] = result.choice.bucket_size_mb
    return numbers


def case_fields(
    case: DataParallelCase, variant: Variant, ranks: MeasuringRanks
) -> dict[str, CaseValue]:
    """Returns the case fields of one strategy's record."""
    fields = strategy_case_fields(case.step, variant, ranks)
    rounds = fields.pop("steps")
    return {**fields, "baseline": case.variants[0].label, "rounds": rounds}
