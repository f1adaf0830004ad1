"""What it costs to run the layout that a prediction picks, on sweeps that somebody measured.

A sweep is one model on so many devices with one global batch, measured in several layouts. The
regret of a pick is its measured time over that of the best layout, less 1; of a first choice, and
of the best among the first three, as somebody finds who measures a few steps of each. Beside it
stand a layout drawn at random, whose expected regret is the mean over the sweep, and the usual rule
of thumb: as little model parallelism as was run, then tensor before pipeline, then the largest
micro-batch.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from paceline.planner.calibrations.cases import Array, Case

LEAST_LAYOUTS = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepRegret:
    """Regrets of one sweep, as shares of the best layout's time."""

    family: str
    model: str
    devices: int
    num_layouts: int
    first: float
    best_of_three: float
    random: float
    rule_of_thumb: float


def sweeps(cases: Sequence[Case]) -> list[list[int]]:
    """Returns the numbers of the cases of every sweep with at least five layouts."""
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
    """Returns what picks by these predictions cost, sweep by sweep."""
    return [_regret([cases[n] for n in sweep], predicted[sweep]) for sweep in sweeps(cases)]


def _regret(cases: list[Case], predicted: Array) -> SweepRegret:
    layouts: dict[object, list[int]] = {}
    for number, case in enumerate(cases):
        layouts.setdefault(_layout(case), []).append(number)
    # A layout that was measured several times took the mean of them.
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
