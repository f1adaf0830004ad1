"""Regret of running the predicted best layout, on published sweeps.

A sweep is one model on a fixed number of devices with one global batch, measured in several
layouts. The regret of a layout is its measured time over that of the best layout, minus 1. Regret
is reported for the first choice, and for the best of the first three, which a user finds by
measuring a few steps of each. Two baselines are reported: a random layout, whose expected regret is
the mean over the sweep, and a common rule of thumb: the least model parallelism in the sweep, then
tensor before pipeline, then the largest micro-batch.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from paceline.planner.calibrations.cases import Array, Case

LEAST_LAYOUTS = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepRegret:
    """Regrets of one sweep, relative to the best layout's time."""

    family: str
    model: str
    devices: int
    num_layouts: int
    first: float
    best_of_three: float
    random: float
    rule_of_thumb: float


def sweeps(cases: Sequence[Case]) -> list[list[int]]:
    """Returns the case indices of every sweep with at least `LEAST_LAYOUTS` layouts."""
    found: dict[tuple[object, ...], list[int]] = {}
    for number, case in enumerate(cases):
        run = case.run
        key = (case.family, run.model, case.variant, run.devices, run.context_length)
        found.setdefault((*key, run.global_batch), []).append(number)
    return [
        numbers
        for numbers in found.values()
        if len({_layout(cases[number]) for number in numbers}) >= LEAST_LAYOUTS
    ]


def sweep_regrets(cases: Sequence[Case], predicted: Array) -> list[SweepRegret]:
    """Returns the regret of selecting layouts by these predictions, per sweep."""
    return [_regret([cases[n] for n in sweep], predicted[sweep]) for sweep in sweeps(cases)]


def _regret(cases: list[Case], predicted: Array) -> SweepRegret:
    layouts: dict[object, list[int]] = {}
    for number, case in enumerate(cases):
        layouts.setdefault(_layout(case), []).append(number)
    # Repeated measurements of a layout are averaged.
    members = list(layouts.values())
    measured = np.array([np.mean([cases[n].step_s for n in each]) for each in members])
    by_prediction = np.argsort([np.mean(predicted[each]) for each in members], kind="stable")
    regrets = measured / measured.min() - 1
    parallelism = [_model_parallelism(cases[each[0]]) for each in members]
    thumb = parallelism.index(min(parallelism))
    first = cases[0]
    return SweepRegret(
        family=first.family,
        model=first.run.model,
        devices=first.run.devices or 0,
        num_layouts=len(members),
        first=float(regrets[by_prediction[0]]),
        best_of_three=float(regrets[by_prediction[:3]].min()),
        random=float(regrets.mean()),
        rule_of_thumb=float(regrets[thumb]),
    )


def _layout(case: Case) -> tuple[object, ...]:
    run = case.run
    axes = (run.tensor, run.pipeline, run.interleave, run.context, run.expert, run.data)
    sharding = (run.zero, run.shard, run.sequence_parallel, run.recompute, run.overlap)
    return (*axes, *sharding, case.micro_batch)


def _model_parallelism(case: Case) -> tuple[int, int, int]:
    run = case.run
    return (run.tensor * run.pipeline * run.context, run.pipeline, -case.micro_batch)
