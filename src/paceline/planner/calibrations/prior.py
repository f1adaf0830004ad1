"""What is known of a framework before any of its runs: the constants of others, and their spread.

The constants of all frameworks are normal around common means, on a logarithmic scale. A device, a
generation of devices, a dtype and a non-default mode each have an effect of their own, shared by
all frameworks. What a framework takes beyond all of this is its `slowdown`. `pooling` finds means
and deviations from the published runs; `PooledPrior.fit` draws them to measured runs of the
framework in question, as far as these determine them.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.planner.calibrations.cases import Array, Case, CaseGroup, Variant, group_cases
from paceline.planner.calibrations.fit import Gaussian, find_constants
from paceline.planner.calibrations.parameters import PRIORS, TERMS
from paceline.planner.calibrations.predictor import Effect, Predictor, constant_names, with_effects

TERMS_OF_ALL = ("attention", "matmul_size", "alignment", "exposed", "latency", "step", "dispatch")
"""All terms but the corrections of single sizes, which belong to one framework."""
CONSTANTS = (*constant_names(TERMS_OF_ALL, ()), "async_share", "slowdown")
EXPERT_CONSTANTS = (*CONSTANTS, *TERMS["experts"])
"""With those of mixtures of experts, of which dense runs say nothing."""
NOISE_OF_FEW = 0.05
"""Spread of repeated measurements if there are few rows, in log seconds."""
_EVALUATIONS = 24

_BETWEEN = {"device": 0.2, "generation": 0.3, "dtype": 0.2, "mode": 0.3, "release": 0.2}
"""Prior standard deviation of the effects of each kind."""
_WITHIN = {"device": 0.05, "generation": 0.15, "dtype": 0.05, "mode": 0.1, "release": 0.0}
"""Standard deviation of a framework's own effect around the one that all frameworks share."""


class Known(NamedTuple):
    """Mean and standard deviation of the logarithm of a constant, or of an effect."""

    mean: float
    deviation: float


_GENERATIONS = {
    "v100": "volta",
    "a100": "ampere",
    "rtx-3090": "ampere",
    "rtx-4090": "ada",
    "h": "hopper",
    "b2": "blackwell",
    "b3": "blackwell",
    "gb": "blackwell",
    "mi": "cdna",
}
"""Generation of devices, whose attention kernels are alike, by the first letters of their names."""


_USUAL_RELEASE = "26.02"
"""The releases that others are relative to: those with most runs."""


def generation(device: str) -> str:
    """Returns the generation of a device; its name if it is of none that is known."""
    return next((its for start, its in _GENERATIONS.items() if device.startswith(start)), device)


def effects_of(group: CaseGroup) -> tuple[Effect, ...]:
    """Returns the effects that a group's runs share with those of other frameworks."""
    effects = effects_of_variant(group.variant)
    if group.release not in ("", _USUAL_RELEASE):
        return (*effects, Effect("slowdown", "release", group.release))
    return effects


def effects_of_variant(variant: Variant) -> tuple[Effect, ...]:
    """Returns the effects of a device, dtype and mode."""
    effects = [
        Effect("matmul_share", "device", variant.device),
        Effect("attention_share", "generation", generation(variant.device)),
    ]
    if variant.dtype in ("float8", "float4"):
        effects.append(Effect("matmul_share", "dtype", variant.dtype))
    if variant.variation:
        effects.append(Effect("matmul_share", "mode", variant.variation))
    return tuple(effects)


def between_deviation(effect: Effect) -> float:
    """Returns the prior standard deviation of an effect that no run has shown yet."""
    return _BETWEEN[effect.kind]


def own_deviation(effect: Effect) -> float:
    """Returns how far a framework's effect lies from the one that all frameworks share."""
    return _WITHIN[effect.kind]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Posterior:
    """A framework's constants after its runs: a normal distribution in log space."""

    effects: tuple[Effect, ...]
    point: Array
    covariance: npt.NDArray[np.float64]
    names: tuple[str, ...] = CONSTANTS
    """The constants of the point, before its effects."""

    def predict(self, cases: Sequence[Case]) -> tuple[Array, Array]:
        """Returns the log seconds of cases, and their standard deviations."""
        predictor = Predictor(cases, self.names, effects_of, self.effects)
        predicted, slopes = predictor.slopes(self.point)
        variances = np.einsum("ij,jk,ik->i", slopes, self.covariance, slopes)
        return predicted, np.sqrt(variances)

    def constants(self, variant: Variant) -> dict[str, float]:
        """Returns the constants on a device and dtype."""
        size = len(self.names)
        values = dict(zip(self.names, np.exp(self.point[:size]).tolist(), strict=True))
        offsets = dict(zip(self.effects, self.point[size:].tolist(), strict=True))
        found = with_effects(values, offsets, effects_of_variant(variant))
        return {name: float(value) for name, value in found.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PooledPrior:
    """The distribution of constants over frameworks."""

    constants: Mapping[str, Known]
    """By name, each of `CONSTANTS`, and of a mixture each of `EXPERT_CONSTANTS`, in order."""
    effects: Mapping[Effect, Known]
    """The effects that frameworks share; what no run has shown has mean 0."""

    def effect(self, effect: Effect) -> Known:
        """Returns what is known of the effect on a framework without runs."""
        mean, deviation = self.effects.get(effect, Known(0.0, between_deviation(effect)))
        return Known(mean, float(np.hypot(deviation, own_deviation(effect))))

    def gaussian(self, effects: Sequence[Effect]) -> Gaussian:
        """Returns the prior of a point with these effects."""
        known = list(self.constants.values())
        known += [self.effect(effect) for effect in effects]
        limits = np.full(len(known), np.inf)
        limits[: len(self.constants)] = [np.log(PRIORS[name].most) for name in self.constants]
        means = np.array([each.mean for each in known])
        return Gaussian(
            mean=np.minimum(means, limits),
            deviation=np.array([each.deviation for each in known]),
            most=limits,
        )

    def fit(
        self, cases: Sequence[Case], *, weights: Array | None = None, also: Sequence[Variant] = ()
    ) -> Posterior:
        """Returns a framework's constants given its measured runs, which may be none.

        Args:
            cases: The measured runs.
            weights: Counts a run as so many; 1 each by default.
            also: Devices, dtypes and modes to be predicted beside those of the runs.
        """
        names = tuple(self.constants)
        effects = self._effects(cases, also)
        prior = self.gaussian(effects)
        information = np.diag(1 / prior.deviation**2)
        if not len(cases):
            return Posterior(
                effects=effects,
                point=prior.mean,
                covariance=np.diag(prior.deviation**2),
                names=names,
            )
        predictor = Predictor(cases, names, effects_of, effects)
        found = find_constants(
            predictor,
            prior,
            noise=NOISE_OF_FEW,
            weights=weights,
            evaluations=_EVALUATIONS,
            from_slow_links=False,
        )
        covariance = np.asarray(np.linalg.inv(found.information + information), dtype=np.float64)
        return Posterior(effects=effects, point=found.point, covariance=covariance, names=names)

    def of_experts(self, slowdown: float = 0.0) -> "PooledPrior":
        """Returns the prior of the framework's mixtures of experts.

        `slowdown` is the logarithm of what the framework takes beyond others for dense models.
        """
        constants = {
            **self.constants,
            "slowdown": Known(slowdown, self.constants["slowdown"].deviation),
            **{
                name: Known(float(np.log(PRIORS[name].mean)), PRIORS[name].deviation)
                for name in TERMS["experts"]
            },
        }
        return PooledPrior(constants=constants, effects=self.effects)

    @staticmethod
    def _effects(cases: Sequence[Case], also: Sequence[Variant]) -> tuple[Effect, ...]:
        found = {each for own in also for each in effects_of_variant(own)}
        for group in group_cases(list(cases)):
            found.update(effects_of(group))
        return tuple(sorted(found))
