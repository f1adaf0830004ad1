"""Ranks to measure on: those that a launcher has started, or ranks started here.

Steps of several subjects are interleaved on the same ranks, and measured or traced. In every round
each subject takes one step, in a new random order, so that a slowdown of the machine affects all of
them. The objects that a rank builds stay on it between calls.
"""

import abc
import dataclasses
import os
import pathlib
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from paceline.benchmarks.config import DataParallelSweep, LayoutSweep
from paceline.benchmarks.harness.measure import resolve_device
from paceline.benchmarks.options import RankSweep
from paceline.core.errors import PacelineError, UsageError
from paceline.core.host import threads_per_rank
from paceline.core.units import Progress
from paceline.devices import accelerator
from paceline.devices.hardware import describe_hardware
from paceline.parallel import RankPool, distributed_session
from paceline.parallel.ranks.collectives import reduce_numbers
from paceline.parallel.ranks.placement import is_launched
from paceline.records import CaseValue, Record
from paceline.records.schema import Outcome
from paceline.traces.capture import record_ranks

Result = TypeVar("Result")

BUILDING_S = 600.0
"""Seconds allowed for building the models and the first steps, compilation included."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuringRanks:
    """A group of ranks, as seen by a process that creates records."""

    world_size: int
    is_first: bool
    """Whether this process is the one that yields records."""
    survives_failure: bool
    """Whether the ranks can be used again after a failed run."""
    topology: dict[str, CaseValue]
    """Fields that describe the group in a record's case."""
    run: Callable[..., Any]
    """Runs ``function(device, *arguments)`` on every rank and returns the first rank's result.

    Under a launcher every rank has called this; elsewhere functions and arguments are pickled."""

    def on_first(self, records: Iterable[Record]) -> Iterator[Record]:
        """Measures records on every rank, and yields them only on the first."""
        return (record for record in records if self.is_first)

    def attempt(
        self, measure: Callable[[], Result], obstacle: str | None = None
    ) -> tuple[Result | None, Outcome, str | None]:
        """Returns the result of runs on the ranks, or None and why it failed or was skipped."""
        if obstacle is not None:
            return None, "skipped", obstacle
        try:
            return measure(), "ok", None
        except PacelineError as error:
            if not self.survives_failure:
                raise
            # The last line of a rank's error, without the traceback before it.
            return None, "failed", str(error).strip().rpartition("\n")[2]


def measuring_ranks(
    *,
    world_sizes: Sequence[int],
    default: Sequence[int],
    flag: str,
    device: str,
    timeout_s: float,
    run_timeout_s: float,
) -> Iterator[MeasuringRanks]:
    """Yields the launcher's ranks, or starts and yields one group of ranks per world size.

    `world_sizes` come from `flag` and must be empty under a launcher; elsewhere they default to
    `default`. A collective without progress is an error after `timeout_s`; a run on ranks started
    here is an error after `run_timeout_s`.
    """
    if is_launched(os.environ):
        if world_sizes:
            raise UsageError(f"{flag}: the launcher has started the ranks; leave it out")
        with distributed_session(device=device, timeout_s=timeout_s) as session:
            yield MeasuringRanks(
                world_size=session.world_size,
                is_first=session.rank == 0,
                # A collective that failed on one rank leaves the others in an unknown state.
                survives_failure=False,
                topology={
                    "world_size": session.world_size,
                    "num_hosts": session.placement.num_hosts,
                    "backend": session.backend,
                    **describe_hardware(session.device).as_case(),
                },
                run=lambda function, *arguments: function(session.device, *arguments),
            )
        return
    chosen = resolve_device(device)
    for world_size in world_sizes or default:
        if chosen.type != "cpu" and accelerator.num_accelerators() < world_size:
            raise UsageError(
                f"{world_size} ranks need as many accelerators, but this machine has "
                f"{accelerator.num_accelerators()}; use --device cpu or a smaller {flag}"
            )
        backend = accelerator.default_backend(chosen.type)
        with RankPool(
            world_size, backend=backend, timeout_s=timeout_s, run_timeout_s=run_timeout_s
        ) as pool:

            def run(function: Callable[..., Any], *arguments: Any, pool: RankPool = pool) -> Any:
                return pool.run(_on_rank, function, chosen.type, *arguments)[0]

            yield MeasuringRanks(
                world_size=world_size,
                is_first=True,
                survives_failure=True,
                topology={
                    "world_size": world_size,
                    "num_hosts": 1,
                    "backend": backend,
                    **describe_hardware(chosen).as_case(),
                    "threads": threads_per_rank(world_size),
                },
                run=run,
            )


def sweep_ranks(sweep: RankSweep, *, grace_s: float = BUILDING_S) -> Iterator[MeasuringRanks]:
    """Yields the single group of ranks of a sweep; by default two ranks."""
    return measuring_ranks(
        world_sizes=() if sweep.world_size is None else (sweep.world_size,),
        default=(2,),
        flag="--world-size",
        device=sweep.device,
        timeout_s=sweep.timeout_s,
        run_timeout_s=sweep.timeout_s + grace_s,
    )


def _on_rank(
    rank: int, _world_size: int, function: Callable[..., Any], device_type: str, *arguments: Any
) -> Any:
    return function(accelerator.nth_device(device_type, rank), *arguments)


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
InterleavedSweep: TypeAlias = DataParallelSweep | LayoutSweep
"""The sweeps whose subjects are interleaved."""


def measure_rounds(
    ranks: MeasuringRanks,
    benchmark: Benchmark,
    case: Any,
    sweep: InterleavedSweep,
    on_progress: Progress,
) -> list[Any]:
    """Runs all rounds of a case, or fewer if the time limit is reached; returns its results."""
    _warm_up(ranks, benchmark, case, sweep, on_progress)
    # Every rank adds up the slowest rank's times, so that all stop after the same round.
    elapsed_s = 0.0
    for completed in range(sweep.rounds):
        elapsed_s += ranks.run(run_round, True)
        on_progress(sweep.warmup + completed + 1, sweep.warmup + sweep.rounds)
        if elapsed_s > sweep.time_limit_s:
            break
    results: list[Any] = ranks.run(collect)
    return results


def trace_case(
    ranks: MeasuringRanks,
    benchmark: Benchmark,
    case: Any,
    sweep: InterleavedSweep,
    trace: pathlib.Path,
    on_progress: Progress,
) -> Any:
    """Warms a case up and traces its rounds in one file, which all ranks must be able to access."""
    _warm_up(ranks, benchmark, case, sweep, on_progress)
    traced = ranks.run(trace_rounds, trace, sweep.rounds)
    on_progress(sweep.warmup + sweep.rounds, sweep.warmup + sweep.rounds)
    return traced


def _warm_up(
    ranks: MeasuringRanks,
    benchmark: Benchmark,
    case: Any,
    sweep: InterleavedSweep,
    on_progress: Progress,
) -> None:
    ranks.run(prepare, benchmark, case)
    for completed in range(sweep.warmup):
        ranks.run(run_round, False)
        on_progress(completed + 1, sweep.warmup + sweep.rounds)


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
