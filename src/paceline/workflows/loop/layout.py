"""How a chosen model is run on this machine, and how long that should take."""

import dataclasses
import pathlib
import statistics
from collections.abc import Sequence

from paceline.core.errors import UsageError
from paceline.core.plan import Estimate
from paceline.core.strategies import StrategyName
from paceline.prediction.calibration_records import calibrations
from paceline.prediction.history import HistoryEntry, corrected
from paceline.prediction.step import PREDICTED
from paceline.records import RecordStore
from paceline.records.environment import threads_per_rank
from paceline.training.config import RunConfig
from paceline.training.forecast import Forecast, forecast
from paceline.workflows.loop.directory import ChosenLayout, LayoutCandidate
from paceline.workflows.sweep.design import PlannedRun
from paceline.workflows.sweep.directory import RunRow, run_config

_EVALUATIONS = 10
"""Of the final run, so that its loss can be followed."""
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


def choose_layout(
    base: RunConfig,
    run: PlannedRun,
    ranks: Sequence[int],
    calibration: pathlib.Path,
    rows: Sequence[RunRow],
    history: Sequence[HistoryEntry],
) -> ChosenLayout:
    """Returns the fastest layout of this machine, with what is predicted of the run.

    Args:
        base: What all runs have in common.
        run: The model to train.
        ranks: Numbers of ranks to choose from.
        calibration: Records of each of these numbers, on this model.
        rows: The runs of the sweep that have ended, which tell how long a start takes.
        history: What was predicted before, which corrects these predictions.
    """
    known = calibrations(RecordStore(calibration).read())
    found: list[tuple[LayoutCandidate, Forecast]] = []
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
            candidate = LayoutCandidate(
                ranks=count,
                strategy=strategy,
                step_time_s=predicted.step_time_s,
                memory_bytes=predicted.memory.total,
            )
            found.append((candidate, predicted))
    found.sort(key=lambda pair: pair[0].step_time_s)
    best = found[0][0]
    hardware = str(known[0].topology["hardware"])
    step = corrected("step_time_s", best.step_time_s, hardware, history)
    config = final_config(base, run, pathlib.Path("run"), _named(best.strategy))
    return ChosenLayout(
        candidates=tuple(candidate for candidate, _ in found),
        hardware=hardware,
        threads=threads_per_rank(best.ranks),
        step_time_s=step,
        memory_bytes=corrected("memory_bytes", best.memory_bytes, hardware, history),
        duration_s=_duration(step, config, run, rows),
    )


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
