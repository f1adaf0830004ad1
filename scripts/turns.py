"""Alternates two variants of the same training steps in one process, and records their times."""

import argparse
import pathlib
import statistics
from collections.abc import Callable

import torch
from sample_tokens import prepare_sample

from paceline.benchmarks.harness.measure import ratio_metric
from paceline.benchmarks.harness.records import measured
from paceline.data.loader.config import SourceConfig
from paceline.parallel.ranks.hardware import describe_hardware
from paceline.records import RecordStore
from paceline.training.config import (
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    StepConfig,
)

TURN = 10
"""Steps per turn: the default of `watch.hash_every_steps`."""
RANKS = 2

Turn = Callable[[], float]
"""Runs the steps of a turn and returns their seconds."""


def take_turns(subject: Turn, baseline: Turn, number: int) -> tuple[list[float], list[float]]:
    """Runs turns of both in alternating order, and returns the seconds of each."""
    subject(), baseline()
    subject_s, baseline_s = [], []
    for turn in range(number):
        if turn % 2:
            subject_s.append(subject())
        baseline_s.append(baseline())
        if not turn % 2:
            subject_s.append(subject())
    return subject_s, baseline_s


def parse_arguments(description: str) -> argparse.Namespace:
    """Parses the command line that these measurements share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("store", type=pathlib.Path)
    parser.add_argument("--model", default="bytes-34M")
    parser.add_argument("--strategy", default="bucketed")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--turns", type=int, default=12)
    return parser.parse_args()


def make_config(arguments: argparse.Namespace, place: pathlib.Path) -> RunConfig:
    """Returns the config of the run, with a dataset that is prepared in `place`."""
    return RunConfig(
        out=str(place / "run"),
        model=ModelConfig(preset=arguments.model),
        data=DataConfig(
            sources=(SourceConfig(place=prepare_sample(place)),), context_length=arguments.context
        ),
        training=StepConfig(
            steps=10**6, batch_size=RANKS * arguments.batch, micro_batch_size=arguments.batch
        ),
        parallel=ParallelConfig(strategy=arguments.strategy),
        evaluation=EvaluationConfig(sequences=0),
    )


def record_turns(
    arguments: argparse.Namespace,
    subject: str,
    baseline: str,
    subject_s: list[float],
    baseline_s: list[float],
) -> None:
    """Prints the times and their ratio, and appends a `comparison` record."""
    ratio = ratio_metric(subject_s, baseline_s)
    case = {
        "subject": f"{TURN} steps, {subject}",
        "baseline": baseline,
        "operation": arguments.strategy,
        "model": arguments.model,
        "batch": arguments.batch,
        "context": arguments.context,
        "world_size": RANKS,
        **describe_hardware(torch.device("cpu")).as_case(),
        "rounds": len(subject_s),
    }
    metrics = {"time_ratio": ratio, "time_s": subject_s, "baseline_time_s": baseline_s}
    RecordStore(arguments.store).append(measured("comparison", case, metrics))
    print(
        f"{subject} {statistics.median(subject_s):.3f} s, {baseline} "
        f"{statistics.median(baseline_s):.3f} s, ratio {ratio.value:.4f} "
        f"(95% {ratio.low:.4f} to {ratio.high:.4f})"
    )
