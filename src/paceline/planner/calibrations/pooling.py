"""Finds what frameworks have in common, and how far they differ, from their published runs.

Two steps, because a joint fit gives good means, and only single fits show the spread:

1. One fit of all frameworks' runs with common constants and effects, and a slowdown of each
   framework. Its point is the mean of a framework that is not among them.
2. Each pool of runs alone: its loss is close to a parabola around its best point, with the
   information H and the gradient g there. The expectation-maximization algorithm finds the
   variance of each constant between frameworks from these parabolas: with mean m and variances T,
   a pool's constants are normal around (H + 1/T)^-1 (H x - g + m/T) with covariance (H + 1/T)^-1.

A framework counts once, regardless of its number of pools, and 61% of all rows are one framework's:
the rows of a family count as at most `_MOST_ROWS`.
"""

import collections
import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from paceline.planner.calibrations.cases import Array, Case, CaseGroup
from paceline.planner.calibrations.fit import Gaussian, find_constants
from paceline.planner.calibrations.parameters import PRIORS
from paceline.planner.calibrations.predictor import Effect, Predictor
from paceline.planner.calibrations.prior import (
    CONSTANTS,
    NOISE_OF_FEW,
    Known,
    PooledPrior,
    between_deviation,
    effects_of,
    own_deviation,
)

_SHARED = CONSTANTS[:-1]
"""The slowdown has no common value: its mean is 1."""
_MOST_ROWS = 40.0
_MOST_ROWS_OF_POOL = 80.0
_MOST_SAMPLED = 120
_NOISE_BETWEEN = 0.08
"""What remains between runs of one framework that share constants with others, in log seconds."""
_TIGHTER = 0.5
"""Factor on the deviations of single constants' priors, for the means of all frameworks."""
_ITERATIONS = 40
_FREEDOM = 3.0
"""The prior variance between frameworks counts as so many frameworks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """The parabola around the best point of one pool of runs."""

    framework: str
    effects: tuple[Effect, ...]
    information: npt.NDArray[np.float64]
    pull: Array
    """Information times point, minus gradient."""


def summarize(cases: Sequence[Case]) -> Summary:
    """Fits one pool alone."""
    predictor = Predictor(cases, _SHARED, effects_of)
    prior = Gaussian.of_constants(_SHARED, list(map(between_deviation, predictor.effects)))
    weights = np.full(len(cases), min(1.0, _MOST_ROWS_OF_POOL / len(cases)))
    found = find_constants(predictor, prior, noise=NOISE_OF_FEW, weights=weights)
    return Summary(
        framework=cases[0].framework,
        effects=predictor.effects,
        information=found.information,
        pull=found.information @ found.point - found.gradient,
    )


def deviations(summaries: Sequence[Summary]) -> dict[str, float]:
    """Returns the standard deviation of each constant between frameworks."""
    pools = collections.Counter(each.framework for each in summaries)
    weights = np.array([1 / pools[each.framework] for each in summaries])[:, np.newaxis]
    known = Gaussian.of_constants(_SHARED, [])
    usual = (_TIGHTER * known.deviation) ** 2
    mean, variance = known.mean.copy(), usual.copy()
    effects = {effect: 0.0 for each in summaries for effect in each.effects}
    size = len(_SHARED)
    for _ in range(_ITERATIONS):
        points, variances = [], []
        shown: dict[Effect, list[tuple[float, float]]] = collections.defaultdict(list)
        for each, weight in zip(summaries, weights[:, 0].tolist(), strict=True):
            own = [effects[effect] for effect in each.effects]
            spread = [own_deviation(effect) ** 2 for effect in each.effects]
            precision = 1 / np.concatenate([variance, spread])
            covariance = np.linalg.inv(each.information + np.diag(precision))
            point = covariance @ (each.pull + precision * np.concatenate([mean, own]))
            points.append(np.minimum(point[:size], known.most))
            variances.append(np.diag(covariance)[:size])
            for effect, value in zip(each.effects, point[size:].tolist(), strict=True):
                shown[effect].append((weight, value))
        at = np.array(points)
        precision = weights.sum() / variance + 1 / known.deviation**2
        mean = ((weights * at).sum(axis=0) / variance + known.mean / known.deviation**2) / precision
        spread_of = (weights * ((at - mean) ** 2 + np.array(variances))).sum(axis=0)
        variance = (spread_of + _FREEDOM * usual) / (weights.sum() + _FREEDOM)
        effects = {effect: _shrunk(effect, values) for effect, values in shown.items()}
    return dict(zip(_SHARED, np.sqrt(variance).tolist(), strict=True))


def _shrunk(effect: Effect, values: Iterable[tuple[float, float]]) -> float:
    """Returns the mean of an effect over pools (weight, value), drawn towards 0."""
    pairs = list(values)
    own, between = own_deviation(effect) ** 2, between_deviation(effect) ** 2
    precision = sum(weight for weight, _ in pairs) / own + 1 / between
    return sum(weight * value for weight, value in pairs) / own / precision


def pool(cases: Sequence[Case], summaries: Sequence[Summary]) -> PooledPrior:
    """Returns the prior of a framework that is not among these cases and summaries."""
    sampled, weights = representative(cases)
    predictor = Predictor(sampled, _SHARED, _with_framework)
    prior = Gaussian.of_constants(
        _SHARED,
        [
            PRIORS["slowdown"].deviation if e.kind == "framework" else between_deviation(e)
            for e in predictor.effects
        ],
        scale=_TIGHTER,
    )
    found = find_constants(predictor, prior, noise=_NOISE_BETWEEN, weights=weights)
    covariance = np.linalg.inv(found.information + np.diag(1 / prior.deviation**2))
    size = len(_SHARED)
    spread = deviations(summaries)
    constants = {
        name: Known(mean, spread[name])
        for name, mean in zip(_SHARED, found.point[:size].tolist(), strict=True)
    }
    constants["slowdown"] = Known(0.0, PRIORS["slowdown"].deviation)
    deviation = np.sqrt(np.diag(covariance))[size:].tolist()
    effects = {
        effect: Known(mean, own)
        for effect, mean, own in zip(
            predictor.effects, found.point[size:].tolist(), deviation, strict=True
        )
        if effect.kind != "framework"
    }
    return PooledPrior(constants=constants, effects=effects)


def _with_framework(group: CaseGroup) -> tuple[Effect, ...]:
    return (*effects_of(group), Effect("slowdown", "framework", group.framework))


def representative(cases: Sequence[Case]) -> tuple[list[Case], Array]:
    """Returns evenly spread cases of each family, and the number of rows each counts for."""
    families: dict[str, list[Case]] = collections.defaultdict(list)
    for case in cases:
        families[case.family].append(case)
    sampled, weights = [], []
    for own in families.values():
        chosen = own[:: -(-len(own) // _MOST_SAMPLED)]
        sampled += chosen
        weights += [min(1.0, _MOST_ROWS / len(chosen))] * len(chosen)
    return sampled, np.array(weights)
