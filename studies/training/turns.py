"""Turns of training steps: two ranks train the same model in two ways, ten steps at a time."""

import argparse
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

from paceline.parallel import run_ranks
from paceline.training.config import ModelConfig, ParallelConfig, RunConfig, StepConfig
from studies.harness.records import machine_case, record_comparison
from studies.harness.runs import sample_run
from studies.harness.study import study_parser

TURN = 10
"""Steps per turn: the default of `watch.hash_every_steps`."""
RANKS = 2

TurnsOfRank = Callable[..., dict[str, list[float]]]
"""Takes rank, world size, config, number of turns and more; returns the seconds of both ways."""


def steps_parser(text: str | None) -> argparse.ArgumentParser:
    """Returns the command line of studies that compare training steps."""
    parser = study_parser(text)
    parser.add_argument("--model", default="bytes-34M")
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--context", type=int, default=128)
    return parser


def steps_run(
    arguments: argparse.Namespace, place: pathlib.Path, steps: int, **sections: Any
) -> RunConfig:
    """Returns the config of the run, with a dataset that is prepared in `place`."""
    return sample_run(
        place,
        "run",
        model=ModelConfig(preset=arguments.model),
        context=arguments.context,
        training=StepConfig(
            steps=steps, batch_size=RANKS * arguments.batch, micro_batch_size=arguments.batch
        ),
        parallel=ParallelConfig(strategy=arguments.strategy),
        **sections,
    )


def record_steps(
    arguments: argparse.Namespace, seconds: dict[str, list[float]], case: dict[str, Any]
) -> None:
    """Appends a `comparison` record of two ways to train, the subject first."""
    subject_s, baseline_s = seconds.values()
    setup = {
        "operation": arguments.strategy,
        "model": arguments.model,
        "batch": arguments.batch,
        "context": arguments.context,
        "world_size": RANKS,
        **machine_case(),
    }
    record_comparison(arguments.store, setup | case, subject_s, baseline_s)


def turns_arguments(text: str | None) -> argparse.Namespace:
    """Parses the command line of a study of turns, whose docstring is `text`."""
    parser = steps_parser(text)
    parser.add_argument("--turns", type=int, default=12)
    return parser.parse_args()


def compare_turns(arguments: argparse.Namespace, turns_of_rank: TurnsOfRank, *more: object) -> None:
    """Measures turns on two ranks, and records both ways.

    Args:
        arguments: The command line.
        turns_of_rank: Measures on a rank; the first way that it returns is the subject.
        more: Further arguments of `turns_of_rank`.
    """
    with tempfile.TemporaryDirectory() as directory:
        config = steps_run(arguments, pathlib.Path(directory), 10**6)
        seconds = run_ranks(turns_of_rank, RANKS, config, arguments.turns, *more, timeout_s=7200)[0]
    subject, baseline = seconds
    names = {"subject": f"{TURN} steps, {subject}", "baseline": baseline}
    record_steps(arguments, seconds, names)
