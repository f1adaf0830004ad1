"""Ranks to measure on: those that a launcher has started, or ranks started here."""

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from paceline.benchmarks.harness.records import resolve_device
from paceline.benchmarks.options import RankSweep
from paceline.core.errors import PacelineError, UsageError
from paceline.parallel import RankPool, distributed_session
from paceline.parallel.ranks.hardware import describe_hardware
from paceline.parallel.ranks.placement import is_launched
from paceline.records import CaseValue, Record
from paceline.records.environment import threads_per_rank
from paceline.records.schema import Outcome

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
        if chosen.type == "cuda" and torch.cuda.device_count() < world_size:
            raise UsageError(
                f"{world_size} ranks need as many GPUs, but this machine has "
                f"{torch.cuda.device_count()}; use --device cpu or a smaller {flag}"
            )
        backend = "nccl" if chosen.type == "cuda" else "gloo"
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
    device = torch.device("cuda", rank) if device_type == "cuda" else torch.device("cpu")
    return function(device, *arguments)
