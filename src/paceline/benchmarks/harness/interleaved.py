"""Steps of several subjects, interleaved on the same ranks, measured or traced.

In every round each subject takes one step, in a new random order, so that a slowdown of the machine
affects all of them. The objects that a rank builds stay on it between calls.
"""

import abc
import pathlib
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from paceline.benchmarks.harness.ranks import MeasuringRanks
from paceline.core.units import Progress
from paceline.parallel.ranks.collectives import reduce_numbers
from paceline.traces.capture import record_ranks


class Step(Protocol):
    """A step that can be run repeatedly."""

    def run(self) -> dict[str, float]:
        """Runs the step on this rank, and returns its seconds by name."""
        ...


class InterleavedBenchmark(abc.ABC):
    """All subjects of one case on one rank, with one step for every subject."""

    def __init__(self, steps: Sequence[Step], device: torch.device) -> None:
        self._interleaved = steps
        self._num_rounds = 0
        self.device = device
        self.samples: list[dict[str, list[float]]] = [{} for _ in steps]

    def run_round(self, *, measured: bool) -> float:
        """Runs one step of every subject; returns the slowest rank's seconds for all."""
        began = time.perf_counter()
        order = list(range(len(self._interleaved)))
        random.Random(self._num_rounds).shuffle(order)  # The same on all ranks.
        self._num_rounds += 1
        for index in order:
            laps = self._interleaved[index].run()
            if measured:
                for name, seconds in laps.items():
                    self.samples[index].setdefault(name, []).append(seconds)
        return self.largest([time.perf_counter() - began])[0]

    def trace_rounds(
        self, trace: pathlib.Path, num_rounds: int, after_round: Callable[[], None] = lambda: None
    ) -> Any:
        """Traces some rounds on every rank; returns what the trace does not show, if anything."""
        with record_ranks(trace, self.device):
            for _ in range(num_rounds):
                self.run_round(measured=False)
                after_round()

    def largest(self, values: Sequence[float]) -> list[float]:
        """Returns the maximum of each value over all ranks."""
        return reduce_numbers(values, dist.ReduceOp.MAX, self.device)

    @abc.abstractmethod
    def results(self) -> list[Any]:
        """Combines the ranks' measurements of every subject; all ranks call it."""


Benchmark = Callable[[Any, torch.device], InterleavedBenchmark]
"""Builds the benchmark of a case on this rank's device."""


def measure_rounds(
    ranks: MeasuringRanks,
    benchmark: Benchmark,
    case: Any,
    *,
    warmup: int,
    rounds: int,
    time_limit_s: float,
    on_progress: Progress,
) -> list[Any]:
    """Runs all rounds of a case, or fewer if the time limit is reached; returns its results."""
    _warm_up(ranks, benchmark, case, warmup, rounds, on_progress)
    # Every rank adds up the slowest rank's times, so that all stop after the same round.
    elapsed_s = 0.0
    for completed in range(rounds):
        elapsed_s += ranks.run(run_round, True)
        on_progress(warmup + completed + 1, warmup + rounds)
        if elapsed_s > time_limit_s:
            break
    results: list[Any] = ranks.run(collect)
    return results


def trace_case(
    ranks: MeasuringRanks,
    benchmark: Benchmark,
    case: Any,
    trace: pathlib.Path,
    *,
    warmup: int,
    rounds: int,
    on_progress: Progress,
) -> Any:
    """Warms a case up and traces its rounds in one file, which all ranks must be able to access."""
    _warm_up(ranks, benchmark, case, warmup, rounds, on_progress)
    traced = ranks.run(trace_rounds, trace, rounds)
    on_progress(warmup + rounds, warmup + rounds)
    return traced


def _warm_up(
    ranks: MeasuringRanks,
    benchmark: Benchmark,
    case: Any,
    warmup: int,
    rounds: int,
    on_progress: Progress,
) -> None:
    ranks.run(prepare, benchmark, case)
    for completed in range(warmup):
        ranks.run(run_round, False)
        on_progress(completed + 1, warmup + rounds)


# A rank holds one case at a time.
_held: list[InterleavedBenchmark] = []


def prepare(device: torch.device, benchmark: Benchmark, case: Any) -> None:
    """Builds a case on this rank, after releasing the previous one."""
    _held.clear()
    _held.append(benchmark(case, device))


def run_round(_device: torch.device, measured: bool) -> float:
    """Runs one round of the case that this rank holds."""
    return _held[0].run_round(measured=measured)


def trace_rounds(_device: torch.device, trace: pathlib.Path, num_rounds: int) -> Any:
    """Traces some rounds of the case that this rank holds."""
    return _held[0].trace_rounds(trace, num_rounds)


def collect(_device: torch.device) -> list[Any]:
    """Releases the case that this rank holds, and returns its results."""
    results = _held[0].results()
    _held.clear()
    return results
