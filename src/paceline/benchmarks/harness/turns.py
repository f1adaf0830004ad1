"""Steps of several subjects, interleaved on the same ranks.

In every round each subject takes one step, in a new random order, so that a slowdown of the machine
affects all of them. The objects that a rank builds stay on it between calls.
"""

import abc
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from paceline.benchmarks.harness.ranks import MeasuringRanks
from paceline.core.units import Progress
from paceline.parallel.ranks.collectives import reduce_numbers


class Step(Protocol):
    """A step that can be run repeatedly."""

    def run(self) -> dict[str, float]:
        """Runs the step on this rank, and returns its seconds by name."""
        ...


class Turns(abc.ABC):
    """All subjects of one case on one rank.

    Args:
        steps: One step for every subject.
        device: The device that this rank computes on.
    """

    def __init__(self, steps: Sequence[Step], device: torch.device) -> None:
        self._turns = steps
        self._num_rounds = 0
        self.device = device
        self.samples: list[dict[str, list[float]]] = [{} for _ in steps]

    def run_round(self, *, measured: bool) -> float:
        """Runs one step of every subject; returns the slowest rank's seconds for all."""
        began = time.perf_counter()
        order = list(range(len(self._turns)))
        random.Random(self._num_rounds).shuffle(order)  # The same on all ranks.
        self._num_rounds += 1
        for index in order:
            laps = self._turns[index].run()
            if measured:
                for name, seconds in laps.items():
                    self.samples[index].setdefault(name, []).append(seconds)
        return self.largest([time.perf_counter() - began])[0]

    def largest(self, values: Sequence[float]) -> list[float]:
        """Returns the maximum of each value over all ranks."""
        return reduce_numbers(values, dist.ReduceOp.MAX, self.device)

    @abc.abstractmethod
    def results(self) -> list[Any]:
        """Combines the ranks' measurements of every subject; all ranks call it."""


# A rank holds one case at a time.
_held: list[Turns] = []


def hold(make: Callable[[], Turns]) -> None:
    """Builds a case on this rank, after releasing the previous one."""
    _held.clear()
    _held.append(make())


def held() -> Turns:
    """Returns the case that this rank holds."""
    return _held[0]


def run_round(_device: torch.device, measured: bool) -> float:
    """Runs one round of the case that this rank holds."""
    return held().run_round(measured=measured)


def collect(_device: torch.device) -> list[Any]:
    """Releases the case that this rank holds, and returns its results."""
    results = held().results()
    _held.clear()
    return results


def warm_up(ranks: MeasuringRanks, warmup: int, rounds: int, on_progress: Progress) -> None:
    """Runs the unmeasured rounds."""
    for completed in range(warmup):
        ranks.run(run_round, False)
        on_progress(completed + 1, warmup + rounds)


def measure_rounds(
    ranks: MeasuringRanks, warmup: int, rounds: int, time_limit_s: float, on_progress: Progress
) -> list[Any]:
    """Runs all rounds of the held case, or fewer if the time limit is reached; returns results."""
    warm_up(ranks, warmup, rounds, on_progress)
    # Every rank adds up the slowest rank's times, so that all stop after the same round.
    elapsed_s = 0.0
    for completed in range(rounds):
        elapsed_s += ranks.run(run_round, True)
        on_progress(warmup + completed + 1, warmup + rounds)
        if elapsed_s > time_limit_s:
            break
    results: list[Any] = ranks.run(collect)
    return results
