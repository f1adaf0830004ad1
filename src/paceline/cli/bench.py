"""``paceline bench``: measure, append to the store, print."""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, TypeAlias

import tyro

from paceline.benchmarks.attention.config import AttentionSweep
from paceline.benchmarks.collectives.config import CollectiveSweep
from paceline.benchmarks.kernels.config import KernelSweep
from paceline.benchmarks.optimizer_memory.config import OptimizerSweep
from paceline.benchmarks.step.config import StepSweep
from paceline.benchmarks.strategies.config import DataParallelSweep
from paceline.cli.output import (
    OutputOptions,
    case_progress,
    keep_records,
    print_tables,
)
from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from paceline.records import Record

DEFAULT_STORE = pathlib.Path("paceline-records.jsonl")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """Where records go."""

    store: pathlib.Path = DEFAULT_STORE
    """JSON Lines file to append the records to."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchStepCommand:
    """Time forward, backward and optimizer of a language model, and its peak memory."""

    sweep: StepSweep
    store: StoreOptions
    output: OutputOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchAttentionCommand:
    """Time attention forward and backward, and what it keeps for backward."""

    sweep: AttentionSweep
    store: StoreOptions
    output: OutputOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchCollectivesCommand:
    """Time collectives, and fit their latency and bandwidth."""

    sweep: CollectiveSweep
    store: StoreOptions
    output: OutputOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchDdpCommand:
    """Time training steps under several data-parallel strategies, in turn on the same ranks."""

    sweep: DataParallelSweep
    store: StoreOptions
    output: OutputOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchMemoryCommand:
    """Measure what the memory of a step holds, with and without sharding, beside its prediction."""

    sweep: OptimizerSweep
    store: StoreOptions
    output: OutputOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchKernelsCommand:
    """Compile the attention kernels for GPUs that need not be there, and tell what they take."""

    sweep: KernelSweep
    store: StoreOptions
    output: OutputOptions


Subject: TypeAlias = (
    BenchStepCommand
    | BenchAttentionCommand
    | BenchCollectivesCommand
    | BenchDdpCommand
    | BenchMemoryCommand
    | BenchKernelsCommand
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchCommand:
    """Measure one part of training and append the records to a store."""

    subject: (
        Annotated[BenchStepCommand, tyro.conf.subcommand("step")]
        | Annotated[BenchAttentionCommand, tyro.conf.subcommand("attention")]
        | Annotated[BenchCollectivesCommand, tyro.conf.subcommand("comm")]
        | Annotated[BenchDdpCommand, tyro.conf.subcommand("ddp")]
        | Annotated[BenchMemoryCommand, tyro.conf.subcommand("memory")]
        | Annotated[BenchKernelsCommand, tyro.conf.subcommand("kernels")]
    )


def run(command: BenchCommand) -> int:
    """Measures every case; fails when one failed for another reason than its size."""
    subject = command.subject
    num_cases = _num_cases(subject)
    if num_cases == 0:
        raise UsageError("nothing to measure: every list of the sweep needs at least one value")

    from paceline.records.kinds import PREDICTION

    records: list[Record] = []
    with case_progress(num_cases) as progress:
        made = _records(subject, progress.step)
        for record in keep_records(made, subject.store.store, subject.output):
            records.append(record)
            if record.kind != PREDICTION:
                progress.next_case()
    if not subject.output.json:
        print_tables(records)
    return 1 if any(record.outcome in ("failed", "timeout") for record in records) else 0


def _num_cases(subject: Subject) -> int:
    if isinstance(subject, BenchDdpCommand):
        return sum(len(case.variants) for case in subject.sweep.cases())
    return len(list(subject.sweep.cases()))


def _records(
    subject: Subject,
    on_progress: Callable[[int, int], None],
) -> "Iterator[Record]":
    if isinstance(subject, BenchCollectivesCommand):
        from paceline.benchmarks.collectives.sweep import collective_records

        return collective_records(subject.sweep)

    if isinstance(subject, BenchDdpCommand):
        import logging

        from paceline.benchmarks.strategies.sweep import data_parallel_records

        # Of the benchmarks alone: under a launcher the container on this rank says the same.
        logging.basicConfig(format="paceline: %(message)s")
        logging.getLogger("paceline.benchmarks").setLevel(logging.INFO)
        return data_parallel_records(subject.sweep, on_progress)

    if isinstance(subject, BenchMemoryCommand):
        from paceline.benchmarks.optimizer_memory.sweep import optimizer_records

        return optimizer_records(subject.sweep)

    if isinstance(subject, BenchKernelsCommand):
        from paceline.benchmarks.kernels.compile import kernel_records

        return kernel_records(subject.sweep, on_progress)

    from paceline.benchmarks.attention.sweep import attention_records
    from paceline.benchmarks.step.sweep import step_records

    if isinstance(subject, BenchStepCommand):
        return step_records(subject.sweep, on_progress)
    return attention_records(subject.sweep, on_progress)
