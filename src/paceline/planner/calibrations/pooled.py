"""Calibrations from what all frameworks share, for those that no published run knows.

`data/pooled.json` holds the prior that `pooling` found in all published runs, what each framework's
own runs made of it, and the half-widths of intervals that studies/planner/unseen.py measured by
leaving frameworks out. A framework without a run has the prior's means. One whose runs are of other
devices keeps its constants, with the device's effects. One with a few measured runs of its own has
the prior drawn to them.
"""

import functools
import math
import pathlib
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from paceline.core.errors import HardwareError, PacelineError, UsageError, unknown_name
from paceline.core.hardware import Device, find_device
from paceline.planner.calibrations.calibration import (
    FrameworkCalibration,
    Residual,
    known_calibrations,
    match_calibration,
    ranges,
)
from paceline.planner.calibrations.cases import (
    Case,
    Variant,
    case_of,
    group_cases,
    predictable,
    require_possible,
)
from paceline.planner.calibrations.fit import build_calibrations
from paceline.planner.calibrations.framework_settings import ALIASES, device_name, family
from paceline.planner.calibrations.predictor import Effect, with_effects
from paceline.planner.calibrations.prior import Known, PooledPrior, Posterior, effects_of_variant
from paceline.planner.calibrations.relatives import DRAWN, fit_with_relatives, relatives_of
from paceline.planner.published import published_runs, read_rows

_PATH = pathlib.Path(__file__).parents[1] / "data" / "pooled.json"
OTHER = "other"
"""The framework of which nothing is known."""
_DIGITS = 5


class KnownEffect(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What is known of an effect."""

    constant: str
    kind: str
    value: str
    mean: float
    deviation: float

    @property
    def effect(self) -> Effect:
        """The effect."""
        return Effect(self.constant, self.kind, self.value)


class FrameworkPosterior(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a framework's published runs made of the prior."""

    rows: int
    constants: dict[str, float]
    """Logarithms."""
    effects: tuple[KnownEffect, ...]


class PooledFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """Contents of the data file."""

    constants: dict[str, Known]
    effects: tuple[KnownEffect, ...]
    half_widths: dict[int, float]
    """Logarithm of the 90% interval's factor, by the number of the framework's own runs."""
    half_width_of_new_device: float
    """The same, for a framework whose runs are of other devices."""
    half_width_of_drawn: float
    """The same, for another model of a pool of `relatives.DRAWN`."""
    seen: dict[str, tuple[float, float]]
    """Minimum and maximum of each feature over the published runs."""
    frameworks: dict[str, FrameworkPosterior]
    experts: FrameworkPosterior
    """Of Megatron-Bridge's mixtures of experts."""
    half_width_of_experts: float
    """The same, for a mixture of which the framework has run others."""
    seen_experts: dict[str, tuple[float, float]]
    """The same as `seen`, over the published runs of mixtures."""

    @functools.cached_property
    def prior(self) -> PooledPrior:
        """The distribution of constants over frameworks."""
        effects = {each.effect: Known(each.mean, each.deviation) for each in self.effects}
        return PooledPrior(constants=self.constants, effects=effects)

    @property
    def num_rows(self) -> int:
        """Number of published runs behind the prior."""
        return sum(each.rows for each in self.frameworks.values())

    def half_width(self, num_rows: int) -> float:
        """Returns the log of the 90% interval's factor after so many runs of the framework."""
        return self.half_widths[max(count for count in self.half_widths if count <= num_rows)]


@functools.cache
def pooled() -> PooledFile:
    """Returns the bundled prior."""
    return msgspec.json.decode(_PATH.read_bytes(), type=PooledFile)


def write_pooled(content: PooledFile) -> None:
    """Writes the bundled prior with few digits, so that changes of it can be read."""
    text = msgspec.json.encode(_rounded(msgspec.to_builtins(content)))
    _PATH.write_bytes(msgspec.json.format(text, indent=1) + b"\n")


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return round(value, _DIGITS)
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(each) for each in value]
    return value


def framework_posterior(cases: Sequence[Case], posterior: Posterior) -> FrameworkPosterior:
    """Returns a framework's posterior in the format of the data file."""
    size = len(posterior.names)
    deviations = np.sqrt(np.diag(posterior.covariance))
    values = zip(posterior.effects, posterior.point[size:], deviations[size:], strict=True)
    return FrameworkPosterior(
        rows=len(cases),
        constants=dict(zip(posterior.names, posterior.point[:size].tolist(), strict=True)),
        effects=tuple(
            KnownEffect(*effect, float(mean), float(own)) for effect, mean, own in values
        ),
    )


def framework_name(name: str) -> str:
    """Returns the name under which a framework's runs are known; raises for one without any."""
    known = {*pooled().frameworks, *(each.framework for each in known_calibrations()), OTHER}
    found = family(name).removesuffix("-host")
    if found not in known:
        raise unknown_name("unknown framework", name, sorted({*known, *ALIASES}))
    return found


def calibration_of(
    framework: str, device: str, precision: str, *, of_experts: bool = False
) -> FrameworkCalibration:
    """Returns the calibration that predicts best for a framework on a device and dtype.

    Its own, if it has published runs of dense models on the device. Only Megatron-Bridge has
    published runs of mixtures of experts: all frameworks have its constants for these.
    """
    name, device = framework_name(framework), device_name(device)
    if of_experts:
        return expert_calibration(name, device, precision)
    if name != OTHER:
        own = match_calibration(known_calibrations(), device, precision, framework=name)
        if own is not None:
            return own
    return unmeasured_calibration(name, device, precision)


_OF_EXPERTS = "megatron-bridge"
"""The framework with published runs of mixtures of experts."""
_NEWEST = Effect("slowdown", "release", "26.06")


def expert_calibration(framework: str, device: str, precision: str) -> FrameworkCalibration:
    """Returns the calibration of a framework's mixtures of experts, as of its newest release."""
    content = pooled()
    has_run_some = framework == _OF_EXPERTS
    # Two uncertainties else: of the mixture, and of a framework that has run none.
    of_framework = 0.0 if has_run_some else content.half_width(0)
    return _calibration(
        f"{framework}-experts-{device}-{precision}",
        *(framework, device, precision),
        known=content.experts,
        further=(_NEWEST,) if has_run_some else (),
        half_width=math.hypot(content.half_width_of_experts, of_framework),
        rows=content.experts.rows if has_run_some else 0,
        seen=content.seen_experts,
    )


def unmeasured_calibration(framework: str, device: str, precision: str) -> FrameworkCalibration:
    """Returns the calibration of a framework on a device and dtype that no published run has.

    A framework that has runs elsewhere keeps its constants; any other has those that all share.
    """
    content = pooled()
    known = content.frameworks.get(framework)
    of_all = FrameworkPosterior(
        rows=0, constants={name: each.mean for name, each in content.constants.items()}, effects=()
    )
    half_width = content.half_width(0)
    if known is not None:
        half_width = min(half_width, content.half_width_of_new_device)
    return _calibration(
        f"{framework}-{device}-{precision}",
        *(framework, device, precision),
        known=of_all if known is None else known,
        half_width=half_width,
        rows=0 if known is None else known.rows,
        seen=content.seen,
    )


def _calibration(
    name: str,
    framework: str,
    device: str,
    precision: str,
    *,
    known: FrameworkPosterior,
    further: tuple[Effect, ...] = (),
    half_width: float,
    rows: int,
    seen: dict[str, tuple[float, float]],
) -> FrameworkCalibration:
    """Returns a calibration without rows of its own, from what is `known` of a framework."""
    require_predictable(find_device(device), precision)
    effects = {each.effect: each.mean for each in (*pooled().effects, *known.effects)}
    values = {name: math.exp(mean) for name, mean in known.constants.items()}
    its = (*effects_of_variant(Variant(device, precision)), *further)
    constants = with_effects(values, effects, its)
    return FrameworkCalibration(
        name=name,
        framework=framework,
        device=device,
        precision=precision,
        constants={name: float(value) for name, value in constants.items()},
        rows=(),
        residuals=(),
        half_width_elsewhere=half_width,
        rows_elsewhere=rows,
        seen=seen,
    )


def require_predictable(device: Device, precision: str) -> None:
    """Raises unless a device has matmuls of this dtype and is of a kind with published runs."""
    if device.name.startswith("tpu"):
        raise HardwareError(
            f"{device.name}: the planner is fitted to runs on GPUs; the compiler and the links of "
            "TPUs differ too much from them for a prediction"
        )
    stated = set(device.peak_flops) | ({"float4"} if device.name.startswith("b") else set())
    if precision not in stated:
        raise HardwareError(
            f"{device.name} has no {precision} matmuls; --precision can be one of "
            f"{', '.join(sorted(stated - {'float64', 'tfloat32'}))}"
        )


ENOUGH_ROWS = 15
"""Measured runs from which a framework's own errors are known well enough for its interval."""


def measured_cases(path: pathlib.Path) -> list[Case]:
    """Returns the measured runs of a file; raises for one that cannot be predicted."""
    cases = []
    for run in read_rows(path):
        try:
            case = case_of(run)
            require_possible(case)
            cases.append(case)
        except PacelineError as error:
            raise type(error)(f"{path}, {run.id}: {error}") from error
    if not cases:
        raise UsageError(f"{path}: no measured run in it; give one JSON object per line")
    return cases


def calibrate_rows(measured: Sequence[Case], *, with_published: bool) -> list[FrameworkCalibration]:
    """Fits measured runs by framework, if asked with the published runs of each.

    A few runs draw the prior of all frameworks to them. With many, the framework has constants and
    an interval of its own, unless it is known to be predicted better with its relatives' runs.
    """
    pools: dict[str, list[Case]] = {}
    for case in measured:
        pools.setdefault(case.pool, []).append(case)
    published = predictable(published_runs()) if with_published else []
    for case in published:
        if case.pool in pools:
            pools[case.pool].append(case)
    made = []
    for pool, cases in pools.items():
        if len(cases) < ENOUGH_ROWS or pool in DRAWN:
            made += drawn_calibrations(cases, relatives_of(cases, published))
        else:
            made += build_calibrations(cases)
    return made


def _wider(
    seen: Mapping[str, tuple[float, float]], cases: list[Case]
) -> dict[str, tuple[float, float]]:
    """Returns ranges of features that include those of further cases."""
    own = ranges([(group.layouts, group.workload) for group in group_cases(cases)])
    return {
        name: (min(low, own[name][0]), max(high, own[name][1]))
        for name, (low, high) in seen.items()
    }


def drawn_calibrations(
    cases: Sequence[Case],
    relatives: Sequence[Case] = (),
    *,
    prior: PooledPrior | None = None,
    residuals: Sequence[Residual] = (),
) -> list[FrameworkCalibration]:
    """Returns calibrations drawn from what all frameworks share, one per device and dtype.

    Args:
        cases: A framework's measured runs.
        relatives: Runs of other frameworks with the same kernels.
        prior: What frameworks share; by default, that of all with published runs.
        residuals: Held-out residuals of the runs, to be kept with them.
    """
    content = pooled()
    posterior = fit_with_relatives(prior or content.prior, cases, relatives)
    made = []
    for variant in sorted({case.variant for case in cases if not case.variant.variation}):
        own = [case for case in cases if case.variant == variant]
        made.append(
            FrameworkCalibration(
                name=f"{own[0].framework}-{variant.device}-{variant.dtype}",
                framework=own[0].family,
                device=variant.device,
                precision=variant.dtype,
                constants=posterior.constants(variant),
                rows=tuple(sorted(case.run.id for case in own)),
                residuals=tuple(residuals),
                half_width_elsewhere=(
                    content.half_width_of_drawn
                    if len(cases) >= ENOUGH_ROWS
                    else content.half_width(len(own))
                ),
                # The errors behind the interval are of runs inside and outside of the own ranges.
                seen=_wider(content.seen, own),
                network_bytes_per_s=own[0].run.network_bytes_per_s,
            )
        )
    return made
