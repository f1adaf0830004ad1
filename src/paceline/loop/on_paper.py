"""Plans a loop without running anything, for this machine or a cluster.

Without measured runs, N and the loss come from published scaling laws, with intervals that cover
all of them. Times come from a calibration of this machine, or from the planner for a cluster.
"""

import dataclasses
import pathlib
from collections.abc import Callable

from paceline.accounting.counts import count_parameters, flops_per_token
from paceline.core.errors import UsageError
from paceline.core.plan import Estimate
from paceline.core.specs import ModelShape
from paceline.core.units import format_seconds
from paceline.loop.directory import LoopSpec
from paceline.loop.run_config import run_config
from paceline.loop.sweep_design import (
    COST_OF_LARGEST,
    FINAL,
    NUM_LATER,
    PlannedRun,
    Rule,
    SweepSpec,
    find_shape,
    first_runs,
    planned_run,
    refining_flops,
)
from paceline.planner.goodput.scenario import DAY_S
from paceline.planner.search.advice import Change, sensitivity, variations
from paceline.planner.search.budget import RunEstimate, estimate_run
from paceline.planner.search.search import SearchResult, search
from paceline.planner.search.spec import PerformanceModel, SearchSpec
from paceline.records.schema import with_interval
from paceline.reports.tables.table import Table
from paceline.scaling.decide import WRONG_BY
from paceline.scaling.design import learn_from
from paceline.scaling.model_shapes import cluster_shape, suggested_batch_tokens
from paceline.training.config import RunConfig
from paceline.training.forecast import forecast

_START_S = 10.0
"""Assumed time from the start of a run to its first step; the sweep measures the real one."""


def expected_final(spec: LoopSpec) -> PlannedRun:
    """Returns the run for the budget according to published scaling laws."""
    best = float(learn_from(None).surface.optimal_parameters(spec.budget))
    shape = find_shape(spec.sweep, best)
    if shape is None:
        raise UsageError(
            f"no model with a vocabulary of {spec.vocab_size} has about {best:.3g} parameters; "
            "give a larger --budget, or prepare the text with a smaller vocabulary"
        )
    return planned_run(spec.sweep, FINAL, FINAL, shape, spec.budget, Rule())


def expected_seconds(
    spec: LoopSpec, base: RunConfig, calibration: pathlib.Path, at_once: int
) -> dict[str, float]:
    """Returns the approximate duration of the stages on this machine.

    `at_once` is the number of concurrent runs of the sweep, of calibrated ranks, and of the ranks
    of the final run.
    """
    runs = first_runs(spec.sweep)
    place = pathlib.Path("run")
    times = [
        forecast(run_config(base, run, place), 1, calibration, at_once=at_once).duration_s or 0.0
        for run in runs
    ]
    per_flop = sum(times) / sum(run.flops for run in runs)
    starts = (len(runs) + NUM_LATER) * _START_S
    final = forecast(run_config(base, expected_final(spec), place), at_once, calibration)
    return {
        "sweep": (sum(times) + refining_flops(spec.sweep) * per_flop + starts) / at_once,
        "training": (final.duration_s or 0.0) + _START_S,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """The plan of a loop on a cluster."""

    budget: float
    parameters: Estimate
    """The best N according to published laws."""
    loss: Estimate
    shape: ModelShape
    num_parameters: int
    tokens: float
    wasted: dict[float, float]
    """Share of the budget wasted by a model off by each factor."""
    sweep: list[PlannedRun]
    """The first runs of the sweep; later ones depend on their losses."""
    sweep_flops: float
    """FLOPs of the whole sweep."""
    found: SearchResult
    run: RunEstimate
    changes: list[Change]
    """Changes that would improve the plan, found by repeated searches."""

    @property
    def sweep_days(self) -> float:
        """Duration of the sweep on the same devices, at the throughput of the large run."""
        return self.sweep_flops / self.budget * self.run.days

    @property
    def exploration(self) -> float:
        """FLOPs of the sweep as a fraction of the budget."""
        return self.sweep_flops / self.budget


def plan_on_cluster(
    budget: float,
    exploration: float,
    context_length: int,
    ask: Callable[[ModelShape, int], SearchSpec],
    performance: PerformanceModel,
    *,
    lower_precision: PerformanceModel | None,
    peak_flops: float,
    price: float | None,
    device_interval_h: float,
) -> ClusterPlan:
    """Returns the plan of a loop on a cluster.

    `ask` builds the search question from a model and the number of tokens per step;
    `lower_precision` is the throughput in float8, if devices support it; `price` is that of a
    device-hour.
    """
    posterior = learn_from(None)
    surface = posterior.surface
    parameters = posterior.best_parameters(budget)
    best = parameters.value
    shape = cluster_shape(best, context_length)
    tokens = budget / flops_per_token(shape, context_length).model
    question = ask(shape, suggested_batch_tokens(tokens))
    found = search(question, performance, peak_flops=peak_flops)
    run = estimate_run(
        found.best,
        shape,
        tokens=tokens,
        held_devices=question.num_devices,
        price=price,
        device_interval_h=device_interval_h,
    )
    offered = variations(found.best, question, performance, lower_precision)
    asked = SweepSpec(
        target=budget,
        largest=exploration * budget / COST_OF_LARGEST,
        vocab_size=shape.vocab_size,
        context_length=context_length,
    )
    sizes = [size * best for size in WRONG_BY]
    return ClusterPlan(
        budget=budget,
        parameters=parameters,
        loss=posterior.best_loss(budget),
        shape=shape,
        num_parameters=count_parameters(shape).total,
        tokens=tokens,
        wasted=dict(zip(WRONG_BY, map(float, surface.wasted_compute(budget, sizes)), strict=True)),
        sweep=first_runs(asked),
        sweep_flops=exploration * budget,
        found=found,
        run=run,
        changes=sensitivity(found.best, question, offered),
    )


def in_time(plan: ClusterPlan, deadline_s: float | None) -> bool | None:
    """Returns whether sweep and run finish before the deadline; None without a deadline."""
    if deadline_s is None:
        return None
    return (plan.sweep_days + plan.run.days) * DAY_S <= deadline_s


def cluster_table(plan: ClusterPlan, in_time: bool | None) -> Table:
    """Builds a table with a row per stage: its decision, and the basis for it."""
    shape, run, best = plan.shape, plan.run, plan.found.best
    days = f"{run.days:.3g} days ({run.days_without_failures:.3g} without failures)"
    deadline = {None: "", True: "; in time", False: "; after the deadline"}[in_time]
    cost = "" if run.cost is None else f", cost {run.cost:,.0f}"
    spares = f", {run.spare_hosts} spare hosts" if run.spare_hosts else ""
    off_by_two = plan.wasted[2.0]
    rows = (
        (
            "sweep",
            f"{len(plan.sweep)} runs, then about {NUM_LATER} more: {plan.sweep_flops:.3g} FLOPs "
            f"({plan.exploration:.1%} of the budget), {plan.sweep_days:.3g} days",
            "the same MFU as the large run is assumed",
        ),
        (
            "choose",
            f"N {with_interval(plan.parameters, '{:.3g}'.format)}: {shape.num_layers} layers of "
            f"width {shape.d_model:,}, {plan.num_parameters / 1e9:.3g} billion parameters; "
            f"{plan.tokens:.3g} tokens; loss {with_interval(plan.loss, '{:.2f}'.format)}",
            "published scaling laws; the sweep narrows them. N off by a factor of 2 wastes "
            f"{off_by_two:.1%} of the budget",
        ),
        (
            "plan",
            f"{best.name}; step {with_interval(best.step_time_s, format_seconds)}, MFU "
            f"{best.mfu or 0:.1%}, {1 - best.headroom:.0%} of a device's memory",
            plan.found.performance.note,
        ),
        (
            "train",
            f"{run.steps:,} steps, {days}, goodput {run.goodput:.1%}, about "
            f"{run.interruptions:.0f} interruptions, {run.device_hours:,.0f} device-hours"
            f"{spares}{cost}{deadline}",
            "failures of a device as often as with Llama 3, unless --device-interval-h says "
            "otherwise",
        ),
        (
            "save",
            f"a checkpoint every {format_seconds(run.checkpoint_interval_s)}",
            "the interval that loses least to saving and to failures",
        ),
    )
    return Table(
        headers=("stage", "decision", "where it comes from"),
        rows=rows,
        caption=f"{plan.budget:.3g} FLOPs on {plan.found.spec.num_devices:,} devices, on paper",
    )
