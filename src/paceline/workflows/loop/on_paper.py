"""Plans a loop without running anything, for this machine or a cluster.

Without measured runs, N and the loss come from published scaling laws, with intervals that cover
all of them. Times come from a calibration of this machine, or from the planner for a cluster.
"""

import dataclasses
import pathlib
from collections.abc import Callable

from paceline.accounting.flops import flops_per_token
from paceline.accounting.parameters import count_parameters
from paceline.core.errors import UsageError
from paceline.core.plan import Estimate
from paceline.core.specs import ModelShape
from paceline.planner.goodput.scenario import DAY_S
from paceline.planner.search.advice import Change, variations, what_helps
from paceline.planner.search.budget import RunEstimate, estimate_run
from paceline.planner.search.search import SearchResult, search
from paceline.planner.search.spec import Costs, SearchQuestion
from paceline.scaling.candidates import learn_from
from paceline.scaling.decide import WRONG_BY
from paceline.scaling.model_shapes import cluster_shape, suggested_batch_tokens
from paceline.training.config import RunConfig
from paceline.training.forecast import forecast
from paceline.workflows.loop.choose import best_loss, best_size
from paceline.workflows.loop.directory import LoopQuestion
from paceline.workflows.sweep.design import (
    COST_OF_LARGEST,
    FINAL,
    NUM_LATER,
    PlannedRun,
    Question,
    find_shape,
    first_runs,
    planned_run,
    refining_flops,
)
from paceline.workflows.sweep.rules import Rule
from paceline.workflows.sweep.run_config import run_config

_START_S = 10.0
"""Assumed time from the start of a run to its first step; the sweep measures the real one."""


def expected_final(question: LoopQuestion) -> PlannedRun:
    """Returns the run for the budget according to published scaling laws."""
    best = float(learn_from(None).surface.optimal_parameters(question.budget))
    shape = find_shape(question.sweep, best)
    if shape is None:
        raise UsageError(
            f"no model with a vocabulary of {question.vocab_size} has about {best:.3g} parameters; "
            "give a larger --budget, or prepare the text with a smaller vocabulary"
        )
    return planned_run(question.sweep, FINAL, FINAL, shape, question.budget, Rule())


def expected_seconds(
    question: LoopQuestion, base: RunConfig, calibration: pathlib.Path, at_once: int
) -> dict[str, float]:
    """Returns the approximate duration of the stages on this machine.

    Args:
        question: The question of the loop.
        base: The config shared by all runs.
        calibration: Calibration records for `at_once` ranks.
        at_once: Concurrent runs of the sweep, and ranks of the final run.
    """
    runs = first_runs(question.sweep)
    place = pathlib.Path("run")
    times = [
        forecast(run_config(base, run, place), 1, calibration, at_once=at_once).duration_s or 0.0
        for run in runs
    ]
    per_flop = sum(times) / sum(run.flops for run in runs)
    starts = (len(runs) + NUM_LATER) * _START_S
    final = forecast(run_config(base, expected_final(question), place), at_once, calibration)
    return {
        "sweep": (sum(times) + refining_flops(question.sweep) * per_flop + starts) / at_once,
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
        """FLOPs of the sweep as a share of the budget."""
        return self.sweep_flops / self.budget


def plan_on_cluster(
    budget: float,
    exploration: float,
    context_length: int,
    ask: Callable[[ModelShape, int], SearchQuestion],
    costs: Costs,
    *,
    lower_precision: Costs | None,
    peak_flops: float,
    price: float | None,
    device_interval_h: float,
) -> ClusterPlan:
    """Returns the plan of a loop on a cluster.

    Args:
        budget: FLOPs of the large run.
        exploration: FLOPs of the sweep, as a share of the budget.
        context_length: Tokens per sequence.
        ask: Builds the search question from a model and the number of tokens per step.
        costs: Throughput of devices and links.
        lower_precision: The same in float8, if devices support it.
        peak_flops: Nominal peak FLOP/s of a device.
        price: Price of one device-hour.
        device_interval_h: Mean hours between failures of one device.
    """
    belief = learn_from(None)
    surface = belief.surface
    parameters = best_size(belief, budget)
    best = parameters.value
    shape = cluster_shape(best, context_length)
    tokens = budget / flops_per_token(shape, context_length).model
    question = ask(shape, suggested_batch_tokens(tokens))
    found = search(question, costs, peak_flops=peak_flops)
    run = estimate_run(
        found.best,
        shape,
        tokens=tokens,
        held_devices=question.num_devices,
        price=price,
        device_interval_h=device_interval_h,
    )
    offered = variations(found.best, question, costs, lower_precision)
    asked = Question(
        target=budget,
        largest=exploration * budget / COST_OF_LARGEST,
        vocab_size=shape.vocab_size,
        context_length=context_length,
    )
    sizes = [size * best for size in WRONG_BY]
    return ClusterPlan(
        budget=budget,
        parameters=parameters,
        loss=best_loss(belief, budget),
        shape=shape,
        num_parameters=count_parameters(shape).total,
        tokens=tokens,
        wasted=dict(zip(WRONG_BY, map(float, surface.wasted_compute(budget, sizes)), strict=True)),
        sweep=first_runs(asked),
        sweep_flops=exploration * budget,
        found=found,
        run=run,
        changes=what_helps(found.best, question, offered),
    )


def in_time(plan: ClusterPlan, deadline_s: float | None) -> bool | None:
    """Returns whether sweep and run finish before the deadline; None without a deadline."""
    if deadline_s is None:
        return None
    return (plan.sweep_days + plan.run.days) * DAY_S <= deadline_s
