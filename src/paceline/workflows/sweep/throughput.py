"""Measures how many concurrent runs maximise throughput on this machine.

Small models do not saturate several cores, and concurrent runs compete for memory bandwidth. The
best number is therefore measured, with a few steps of one of the sweep's runs.
"""

import pathlib
import tempfile
from collections.abc import Callable

import msgspec

from paceline.core.errors import PacelineError
from paceline.records.environment import available_processors, threads_per_rank
from paceline.training.config import RunConfig
from paceline.training.run_directory import last_record
from paceline.training.toml_config import encode_config
from paceline.workflows.sweep.design import PlannedRun
from paceline.workflows.sweep.directory import SweepDirectory, SweepState, read_ending
from paceline.workflows.sweep.executors.local import LocalExecutor
from paceline.workflows.sweep.run_config import run_config
from paceline.workflows.sweep.task import RunTask

_STEPS = 40


def runs_at_once(
    directory: SweepDirectory,
    state: SweepState,
    ranks: int,
    wanted: int | None,
    say: Callable[[str], None],
) -> int:
    """Returns the number of concurrent runs, and stores it in the sweep's state.

    Args:
        directory: The sweep.
        state: Its decisions so far.
        ranks: Ranks per run.
        wanted: The user's choice; None to measure the fastest number once.
        say: Called with a message about the measurement.
    """
    at_once = wanted or state.at_once
    if at_once is None:
        at_once = best_at_once(directory.base(), state.runs[0], ranks)
        say(f"concurrent runs: {at_once}, measured to be the fastest on this machine")
    if at_once != state.at_once:
        directory.keep(msgspec.structs.replace(state, at_once=at_once))
    return at_once


def best_at_once(base: RunConfig, run: PlannedRun, ranks: int) -> int:
    """Returns the number of concurrent runs with the highest throughput: one, or the most.

    Args:
        base: The config shared by all runs.
        run: The run to measure; its first steps are executed and discarded.
        ranks: Ranks per run.
    """
    most = max(1, available_processors() // ranks)
    if most == 1:
        return 1
    rates = {at_once: _runs_per_s(base, run, ranks, at_once) for at_once in (1, most)}
    return max(rates, key=rates.__getitem__)


def _runs_per_s(base: RunConfig, run: PlannedRun, ranks: int, at_once: int) -> float:
    short = run.first_steps(_STEPS)
    with tempfile.TemporaryDirectory() as directory:
        tasks = []
        for number in range(at_once):
            place = pathlib.Path(directory) / str(number)
            place.mkdir()
            config = place / "run.toml"
            config.write_text(encode_config(run_config(base, short, place)))
            tasks.append(
                RunTask(
                    label=f"throughput {number}",
                    directory=str(place),
                    config=str(config),
                    ranks=ranks,
                    threads=threads_per_rank(ranks * at_once),
                )
            )
        for _label in LocalExecutor(at_once).run(tasks):
            pass
        return sum(1 / _step_time_s(pathlib.Path(task.directory)) for task in tasks)


def _step_time_s(directory: pathlib.Path) -> float:
    ending = read_ending(directory)
    if ending is None or ending.outcome != "ok":
        reason = "killed" if ending is None else ending.reason
        raise PacelineError(f"measuring how many runs to train at once failed: {reason}")
    return last_record(directory).metrics["step_time_s"].value
