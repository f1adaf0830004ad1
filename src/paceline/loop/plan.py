"""Chooses the layout of a model on this machine, and predicts the duration of the run.

Formulas and a calibration rank the layouts. They miss the overhead of steps of a few milliseconds,
which differs between one process with two threads and two processes. The best layout of each number
of ranks is therefore tried in a short pilot run before one is chosen.
"""

import collections
import dataclasses
import math
import pathlib
import statistics
from collections.abc import Callable, Sequence

import msgspec

from paceline.accounting.intervals import conformal_quantile
from paceline.core.errors import UsageError
from paceline.core.plan import Estimate
from paceline.core.runnable import needs_mesh
from paceline.core.strategies import StrategyName
from paceline.loop.directory import ChosenLayout, LayoutCandidate, LoopStoppedError, PilotRun
from paceline.loop.run_config import run_config
from paceline.loop.sweep_design import PlannedRun
from paceline.loop.sweep_directory import RunRow
from paceline.predict.calibration import calibrations
from paceline.predict.step import PREDICTED
from paceline.records import RecordStore
from paceline.records.environment import threads_per_rank
from paceline.training.config import RunConfig
from paceline.training.forecast import forecast, layout_of

_EVALUATIONS = 10
"""Evaluations of the final run, so that its loss can be monitored."""
_PILOT_STEPS = 200
_LEAST_SPREAD = 0.05
"""Minimum half-width of the step time interval, as a log ratio."""
_MEMORY_SPREAD = 0.03
"""Relative run-to-run spread of peak memory."""
_PASSES_OF_A_STEP = 3
"""One forward, plus a backward that takes twice as long; an evaluation is one forward."""


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
    """Returns the config of the pilot run: the first steps of the final run.

    It includes one evaluation and one checkpoint halfway, so that its peak memory is that of the
    whole run.
    """
    short = run.first_steps(_PILOT_STEPS)
    config = run_config(base, short, directory)
    half = max(1, short.steps // 2)
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
    """Returns the fastest layout on this machine, with predictions for the run.

    The formulas choose a strategy for each number of ranks, and pilot runs choose among these;
    `pilot` returns None if its steps fail. The finished runs of the sweep give the start-up time
    and the run-to-run spread.
    """
    known = calibrations(RecordStore(calibration).read())
    candidates = _candidates(base, run, ranks, calibration)
    fastest = {each.ranks: each for each in reversed(candidates)}
    tried: list[tuple[LayoutCandidate, PilotRun]] = []
    others: list[LayoutCandidate] = []
    for each in candidates:
        made = pilot(each) if fastest[each.ranks] is each else None
        if made is None:
            others.append(each)
        else:
            tried.append((msgspec.structs.replace(each, pilot=made), made))
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
    """Returns every strategy on every number of ranks, in ascending order of predicted time."""
    found = []
    for count in ranks:
        if count > run.batch_size:
            continue
        for strategy in ("none",) if count == 1 else PREDICTED[1:]:
            config = final_config(base, run, pathlib.Path("run"), _named(strategy))
            if needs_mesh(layout_of(config, count)):
                raise UsageError(
                    "the loop predicts data-parallel runs; leave parallel.tensor and the other "
                    "axes of the config at 1"
                )
            predicted = forecast(config, count, calibration)
            assert predicted.step_time_s is not None
            found.append(
                LayoutCandidate(
                    ranks=count,
                    strategy=strategy,
                    step_time_s=predicted.step_time_s,
                    memory_bytes=predicted.memory_bytes or 0,
                )
            )
    return sorted(found, key=lambda each: each.step_time_s)


def _repeat_spread(rows: Sequence[RunRow]) -> float:
    """Returns the run-to-run spread of step times of one model and batch, as a log ratio.

    It covers nine in ten of the sweep's runs that share a model and batch but vary the learning
    rate.
    """
    groups = collections.defaultdict(list)
    for row in rows:
        if row.step_time_s is not None:
            groups[row.num_parameters, row.batch_tokens].append(row.step_time_s)
    errors = [
        abs(math.log(time_s / statistics.median(group)))
        for group in groups.values()
        if len(group) > 1
        for time_s in group
    ]
    return max(conformal_quantile(errors) if errors else 0.0, _LEAST_SPREAD)


def _named(strategy: StrategyName) -> StrategyName:
    """Returns a strategy name that the config accepts; a single rank ignores it."""
    return "ddp" if strategy == "none" else strategy


def _duration(
    step: Estimate, config: RunConfig, run: PlannedRun, rows: Sequence[RunRow]
) -> Estimate:
    """Returns the duration of start-up, as measured in the sweep, plus steps and evaluations."""
    around = [
        row.time_s - row.num_steps * row.step_time_s
        for row in rows
        if row.outcome == "ok" and row.step_time_s is not None and not row.is_resumed
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
