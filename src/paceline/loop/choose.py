"""Chooses the model for a budget, and its layout on this machine.

The choice of the model uses the most probable surface given the runs and a prior from published
surfaces. Thirty small runs alone do not determine the irreducible loss, which limits how far a fit
extrapolates; the prior from all published surfaces constrains it. The methods of `paceline scaling
fit` are reported for comparison, with the problems that they find in the runs.

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
from paceline.core.finding import Finding
from paceline.core.host import threads_per_rank
from paceline.core.plan import Estimate
from paceline.core.runnable import needs_mesh
from paceline.core.strategies import StrategyName
from paceline.loop.directory import (
    ChosenLayout,
    ChosenModel,
    LayoutCandidate,
    LoopSpec,
    LoopStoppedError,
    PilotRun,
    RuleOfThumb,
)
from paceline.loop.run_config import run_config
from paceline.loop.sweep_design import FINAL, PlannedRun, Rule, find_shape, planned_run
from paceline.loop.sweep_directory import ROWS, RunRow, SweepDirectory
from paceline.predict.calibration import calibrations
from paceline.predict.step import PREDICTED
from paceline.records import RecordStore
from paceline.scaling import ScalingFit, diagnose, fit, read_sweep
from paceline.scaling.design import Posterior, learn_from
from paceline.scaling.model_shapes import rule_of_thumb_parameters
from paceline.scaling.surface import tokens_for
from paceline.training.config import RunConfig
from paceline.training.forecast import forecast, layout_of

_WIDEST_LOSS = 0.05
"""Largest relative half-width of the loss interval; a wider prediction is useless."""
_WIDEST_SIZE = 10.0
"""Largest ratio of the upper to the lower end of the interval of N."""


def fit_sweep(directory: SweepDirectory) -> ScalingFit:
    """Fits the runs of a sweep."""
    return fit(read_sweep(directory.path / ROWS))


def choose_model(
    spec: LoopSpec, found: ScalingFit, rule: Rule, rule_findings: Sequence[Finding]
) -> ChosenModel:
    """Returns the model for the budget, trained by the rule that the sweep's check found."""
    posterior = learn_from(found.runs)
    parameters = posterior.best_parameters(spec.budget)
    loss = posterior.best_loss(spec.budget)
    extrapolation = spec.budget / float(found.runs.compute.max())
    findings = (*rule_findings, *diagnose(found, [spec.budget]))
    _require_certain(parameters, loss, findings)
    shape = find_shape(spec.sweep, parameters.value)
    if shape is None:
        raise UsageError(
            f"no model with a vocabulary of {spec.vocab_size} has about "
            f"{parameters.value:.3g} parameters; give a larger --budget"
        )
    run = planned_run(spec.sweep, FINAL, FINAL, shape, spec.budget, rule)
    if spec.most_tokens is not None and run.tokens > spec.most_tokens:
        raise LoopStoppedError(
            f"the best model for {spec.budget:.3g} FLOPs trains on {run.tokens:,} tokens, and "
            f"the text allows {spec.most_tokens:,.0f}; prepare more text, raise --epochs, or "
            "lower --budget"
        )
    return ChosenModel(
        run=run,
        parameters=parameters,
        loss=posterior.loss(run.fitted_parameters, run.tokens),
        noise=posterior.noise,
        reason=found.choice.reason,
        extrapolation=extrapolation,
        findings=findings,
        rule_of_thumb=_rule_of_thumb(spec.budget, posterior),
    )


def _require_certain(parameters: Estimate, loss: Estimate, findings: Sequence[Finding]) -> None:
    """Stops the loop if the fit is too uncertain for the extrapolation."""
    width, sizes = (
        math.log((each.high or each.value) / (each.low or each.value))
        for each in (loss, parameters)
    )
    doubts = "".join(f"\n  {finding}" for finding in findings)
    if width / 2 > _WIDEST_LOSS:
        raise LoopStoppedError(
            f"the sweep predicts the loss only to ±{width / 2:.1%}, too uncertain to choose a "
            f"model; raise --exploration, or lower --budget. Findings:{doubts}"
        )
    if sizes > math.log(_WIDEST_SIZE):
        raise LoopStoppedError(
            f"the sweep only tells that the best N is between {parameters.low:.3g} and "
            f"{parameters.high:.3g}, too uncertain to choose a model; raise --exploration, or "
            f"lower --budget. Findings:{doubts}"
        )


def _rule_of_thumb(budget: float, posterior: Posterior) -> RuleOfThumb:
    parameters = rule_of_thumb_parameters(budget)
    return RuleOfThumb(
        parameters=parameters,
        loss=float(posterior.surface.loss(parameters, tokens_for(budget, parameters))),
        wasted=float(posterior.surface.wasted_compute(budget, [parameters])[0]),
    )


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
    if base.parallel.compression != "none" or base.parallel.outer.sites > 1:
        raise UsageError(
            "the loop predicts steps that average whole gradients; leave parallel.compression none "
            "and parallel.outer.sites 1 in the config"
        )
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
