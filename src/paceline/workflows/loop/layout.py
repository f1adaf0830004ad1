"""How a chosen model is run on this machine, and how long that should take.

Formulas from a calibration order the layouts. They miss what a step of a few milliseconds costs
beside its kernels, which differs between one process with two threads and two processes, so that
the best layout of each number of ranks makes its first steps before one is taken.
"""

import collections
import dataclasses
import math
import pathlib
import statistics
from collections.abc import Callable, Sequence

import msgspec

from paceline.core.errors import UsageError
from paceline.core.plan import Estimate
from paceline.core.strategies import StrategyName
from paceline.prediction.calibration_records import calibrations
from paceline.prediction.step import PREDICTED
from paceline.records import RecordStore
from paceline.records.environment import threads_per_rank
from paceline.training.config import RunConfig
from paceline.training.forecast import forecast
from paceline.workflows.loop.directory import (
    ChosenLayout,
    LayoutCandidate,
    LoopStoppedError,
    PilotRun,
)
from paceline.workflows.sweep.design import PlannedRun
from paceline.workflows.sweep.directory import RunRow, run_config

_EVALUATIONS = 10
"""Of the final run, so that its loss can be followed."""
_PILOT_STEPS = 60
_LEVEL = 0.9
_LEAST_SPREAD = 0.05
"""No interval of a step is narrower on either side."""
_MEMORY_SPREAD = 0.03
"""By how much the peaks of repeated runs differ."""
_PASSES_OF_A_STEP = 3
"""Forward, and backward that takes twice as long; an evaluation is forward alone."""


def final_config(
    base: RunConfig, run: PlannedRun, directory: pathlib.Path, strategy: StrategyName
) -> RunConfig:
    """Returns the config of the final run."""
    config = run_config(base, run, directory)
    return dataclasses.replace(
        config,
        parallel=dataclasses.replace(config.parallel, strategy=strategy),
        evaluation=dataclasses.replace(
            base.evaluation, every_steps=max(1, run.steps // _EVALUATIONS)
        ),
    )


def pilot_config(
    base: RunConfig, run: PlannedRun, directory: pathlib.Path, strategy: StrategyName
) -> RunConfig:
    """Returns the config of the first steps of the final run.

    An evaluation and a checkpoint in the middle of them take their memory as in the whole run.
    """
    steps = min(_PILOT_STEPS, run.steps)
    short = msgspec.structs.replace(run, steps=steps, warmup_steps=min(steps, run.warmup_steps))
    config = run_config(base, short, directory)
    half = max(1, steps // 2)
    return dataclasses.replace(
        config,
        parallel=dataclasses.replace(config.parallel, strategy=strategy),
        evaluation=dataclasses.replace(config.evaluation, every_steps=half),
        checkpoint=dataclasses.replace(config.checkpoint, every_steps=half),
    )


def choose_layout(
    base: RunConfig,
    run: PlannedRun,
    ranks: Sequence[int],
    calibration: pathlib.Path,
    rows: Sequence[RunRow],
    pilot: Callable[[LayoutCandidate], PilotRun | None],
) -> ChosenLayout:
    """Returns the fastest layout of this machine, with what is predicted of the run.

    The formulas choose a strategy for each number of ranks, and pilot runs choose among these.

    Args:
        base: What all runs have in common.
        run: The model to train.
        ranks: Numbers of ranks to choose from.
        calibration: Records of each of these numbers, on this model.
        rows: The runs of the sweep that have ended, which tell how long a start takes and how much
            repeated runs differ.
        pilot: Makes a few steps with a layout; None where they fail.
    """
    known = calibrations(RecordStore(calibration).read())
    candidates = _candidates(base, run, ranks, calibration)
    fastest = {each.ranks: each for each in reversed(candidates)}
    others = [each for each in candidates if fastest[each.ranks] is not each]
    tried = [
        (msgspec.structs.replace(each, pilot=measured), measured)
        for each, measured in ((each, pilot(each)) for each in fastest.values())
        if measured is not None
    ]
    if not tried:
        raise LoopStoppedError(
            f"the pilot runs failed on every number of ranks ({', '.join(map(str, ranks))}); see "
            "log.txt in their directories"
        )
    tried.sort(key=lambda pair: pair[1].step_time_s)
    best, measured = tried[0]
    config = final_config(base, run, pathlib.Path("run"), _named(best.strategy))
    spread = _repeat_spread(rows)
    step = Estimate(
        value=measured.step_time_s,
        low=measured.step_time_s / math.exp(spread),
        high=measured.step_time_s * math.exp(spread),
    )
    return ChosenLayout(
        candidates=(*(each for each, _ in tried), *others),
        hardware=str(known[0].topology["hardware"]),
        threads=threads_per_rank(best.ranks),
        step_time_s=step,
        memory_bytes=Estimate(
            value=measured.memory_bytes,
            low=measured.memory_bytes * (1 - _MEMORY_SPREAD),
            high=measured.memory_bytes * (1 + _MEMORY_SPREAD),
        ),
        duration_s=_duration(step, config, run, rows),
    )


def _candidates(
    base: RunConfig, run: PlannedRun, ranks: Sequence[int], calibration: pathlib.Path
) -> list[LayoutCandidate]:
    """Returns every strategy on every number of ranks, the fastest by the formulas first."""
    found = []
    for count in ranks:
        if count > run.batch_size:
            continue
        for strategy in ("none",) if count == 1 else PREDICTED[1:]:
            config = final_config(base, run, pathlib.Path("run"), _named(strategy))
            predicted = forecast(config, count, calibration)
            if predicted.step_time_s is None or predicted.memory is None:
                raise UsageError(
                    "the loop predicts data-parallel runs; leave parallel.tensor and the other "
                    "axes of the config at 1"
                )
            found.append(
                LayoutCandidate(
                    ranks=count,
                    strategy=strategy,
                    step_time_s=predicted.step_time_s,
                    memory_bytes=predicted.memory.total,
                )
            )
    return sorted(found, key=lambda each: each.step_time_s)


def _repeat_spread(rows: Sequence[RunRow]) -> float:
    """Returns by how much steps of the same model and batch differ from run to run, as a log.

    Nine in ten of the sweep's repeated runs lie within it: those that vary the learning rate.
    """
    groups = collections.defaultdict(list)
    for row in rows:
        if row.step_time_s is not None:
            groups[row.num_parameters, row.batch_tokens].append(row.step_time_s)
    errors = sorted(
        abs(math.log(time_s / statistics.median(group)))
        for group in groups.values()
        if len(group) > 1
        for time_s in group
    )
    rank = min(len(errors) - 1, math.ceil(_LEVEL * len(errors)))
    return max(errors[rank] if errors else 0.0, _LEAST_SPREAD)


def _named(strategy: StrategyName) -> StrategyName:
    """Returns what the config names; one rank needs no strategy and ignores the name."""
    return "bucketed" if strategy == "none" else strategy


def _duration(
    step: Estimate, config: RunConfig, run: PlannedRun, rows: Sequence[RunRow]
) -> Estimate:
    """Returns a start as the sweep's runs had it, all steps, and the evaluations."""
    around = [
        row.time_s - row.num_steps * row.step_time_s
        for row in rows
        if row.outcome == "ok" and row.step_time_s is not None
    ]
    start_s = max(0.0, statistics.median(around)) if around else 0.0
    evaluated = config.evaluation.sequences / run.batch_size / _PASSES_OF_A_STEP
    num_steps = run.steps + evaluated * (run.steps // config.evaluation.every_steps)

    def seconds(step_s: float) -> float:
        return start_s + num_steps * step_s

    return Estimate(
        value=seconds(step.value),
        low=None if step.low is None else seconds(step.low),
        high=None if step.high is None else seconds(step.high),
    )
