"""Predicts measured runs for many values of the constants in one call.

A point is a vector: the logarithms of constants, then the effects. An effect is an offset of the
logarithm of one constant, for all runs of a kind: those on one device, of one dtype, of one
framework. Runs without any of the effects have the constants themselves.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from paceline.planner.calibrations.cases import Array, Case, CaseGroup, group_cases
from paceline.planner.calibrations.parameters import (
    ALWAYS,
    PRIORS,
    TERMS,
    cluster_of,
    require_device,
)
from paceline.predict.cost.cluster import Cluster, Constant, MeasuredCorrections
from paceline.predict.cost.step_time import step_time

_DIFFERENCE = 1e-4


class Effect(NamedTuple):
    """An offset of the logarithm of one constant."""

    constant: str
    kind: str
    """What its runs have in common: variant, device, generation, dtype, mode or framework."""
    value: str


EffectsOf = Callable[[CaseGroup], tuple[Effect, ...]]


def no_effects(_group: CaseGroup) -> tuple[Effect, ...]:
    """Returns no effects: all runs have the same constants."""
    return ()


def constant_names(terms: Iterable[str], cases: Iterable[Case]) -> tuple[str, ...]:
    """Returns the constants of terms, and that of async tensor parallelism if cases have it."""
    overlapped = ["async_share"] if any(case.overlaps_tensor for case in cases) else []
    return (*ALWAYS, *(name for term in terms for name in TERMS.get(term, ())), *overlapped)


def with_effects(
    constants: Mapping[str, Constant], effects: Mapping[Effect, Constant], its: Iterable[Effect]
) -> dict[str, Constant]:
    """Returns constants after those effects of a run that are known. Shares stay below one."""
    values = dict(constants)
    for effect in its:
        if effect in effects:
            value = values.get(effect.constant, PRIORS[effect.constant].mean)
            values[effect.constant] = value * np.exp(effects[effect])
    for name in values:
        values[name] = np.minimum(values[name], PRIORS[name].most)
    return values


def cluster_of_group(
    constants: Mapping[str, Constant], group: CaseGroup, cells: MeasuredCorrections | None = None
) -> Cluster:
    """Returns the cluster that a group's runs had, given the constants with the group's effects."""
    values = dict(constants)
    if group.overlaps_tensor and "async_share" in values:
        values["inner_share"] = values["inner_share"] * values["async_share"]
    device = require_device(group.variant.device)
    if group.network_bytes_per_s is not None:
        device = dataclasses.replace(device, outer_bytes_per_s=group.network_bytes_per_s)
    return cluster_of(values, device, group.variant.dtype, cells=cells)


class Predictor:
    """Log seconds of cases, as a function of points.

    Args:
        cases: The measured runs.
        constants: Names of the constants in a point. Terms of other constants are off.
        effects_of: The effects of a group's runs.
        effects: The effects in a point; None for all that the cases have.
    """

    def __init__(
        self,
        cases: Sequence[Case],
        constants: Sequence[str],
        effects_of: EffectsOf = no_effects,
        effects: Sequence[Effect] | None = None,
    ) -> None:
        self.constants = tuple(constants)
        self._groups = [(group, effects_of(group)) for group in group_cases(list(cases))]
        found = sorted({effect for _, its in self._groups for effect in its})
        self.effects = tuple(found if effects is None else effects)
        self.measured: Array = np.log([case.step_s for case in cases])

    def __call__(self, points: Array) -> Array:
        """Returns the log seconds of all cases, one row per point."""
        points = np.atleast_2d(points)
        size = len(self.constants)
        columns = points.T[..., np.newaxis]
        constants = dict(zip(self.constants, np.exp(columns[:size]), strict=True))
        effects = dict(zip(self.effects, columns[size:], strict=True))
        seconds = np.empty((len(points), len(self.measured)))
        for group, its in self._groups:
            values = with_effects(constants, effects, its)
            cluster = cluster_of_group(values, group)
            steps = step_time(group.layouts, group.workload, cluster, hidden=values["hidden"])
            seconds[:, group.index] = steps.total_s
        return np.log(seconds)

    def slopes(self, point: Array) -> tuple[Array, Array]:
        """Returns the log seconds at a point, and their derivatives: a column per coordinate."""
        # Downwards, because shares may be at their upper bound.
        rows = self(np.vstack([point, point - _DIFFERENCE * np.eye(len(point))]))
        return rows[0], (rows[0] - rows[1:]).T / _DIFFERENCE
