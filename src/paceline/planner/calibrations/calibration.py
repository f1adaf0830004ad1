"""Calibration of a framework on a device: fitted constants, source rows and held-out residuals.

The prediction interval is the 90% quantile of the errors of rows predicted with their model held
out. It uses runs in the same regime (one host or several hosts) if there are enough of them.
Outside the range of the measured rows the interval widens: by half its width for each doubling of
devices, sequence length, model width, tokens per pass or a mesh axis beyond that range.

In a file, bundled or the user's, a calibration is one JSON object with its constants, source rows,
residuals and ranges. The cluster is rebuilt from the constants, so a file stores nothing twice.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np

from paceline.accounting.intervals import conformal_quantile
from paceline.core.errors import UsageError, did_you_mean
from paceline.core.files import read_named
from paceline.core.specs import Precision
from paceline.planner.calibrations.framework_settings import (
    ALIASES,
    FrameworkSettings,
    device_name,
    family,
    framework_settings,
    training_precision,
)
from paceline.planner.calibrations.parameters import cluster_of, require_device
from paceline.predict.cost.cluster import Cluster, MeasuredCorrections
from paceline.predict.cost.layouts import Layouts, Workload

WIDENING_PER_DOUBLING = 0.5
_ENOUGH = 15
"""Minimum number of residuals for a regime to use its own quantile."""


class Residual(NamedTuple):
    """Error of one row, predicted with its model held out."""

    row: str
    model: str
    one_host: bool
    log_ratio: float
    """Logarithm of measured over predicted seconds."""


class FrameworkCalibration(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True
):
    """Step-time constants of one framework, device and dtype; a line of a calibration file."""

    name: str
    framework: str
    device: str
    """Name in the hardware table, if the table lists the device."""
    precision: str
    """dtype of matmuls: bfloat16, float16, float8, float4."""
    constants: dict[str, float]
    """Fitted constants. Shares are fractions of the vendor's stated figures."""
    rows: tuple[str, ...]
    """Fitted rows of this device and dtype."""
    residuals: tuple[Residual, ...]
    """Residuals of these rows, or of all rows fitted together if there are too few."""
    seen: dict[str, tuple[float, float]]
    """Minimum and maximum of each feature over the measured rows."""
    cells: tuple[tuple[int, float], ...] | None = None
    """Entries of the corrections from measured runs of the same sizes."""
    network_bytes_per_s: float | None = None
    """Bandwidth of a device between hosts that the rows' source states; None for the usual one."""
    half_width_elsewhere: float | None = None
    """Log of the 90% interval's factor from errors on other frameworks; None: from residuals."""
    rows_elsewhere: int = 0
    """Number of the framework's rows of other devices that the constants are from, without rows."""

    def __post_init__(self) -> None:
        """Raises if the device is unknown, or a constant is missing."""
        _ = self.cluster, self.hidden

    @functools.cached_property
    def cluster(self) -> Cluster:
        """The rates that the constants describe on the device."""
        cells = None if self.cells is None else MeasuredCorrections(entries=self.cells)
        figures = require_device(self.device)
        if self.network_bytes_per_s is not None:
            figures = dataclasses.replace(figures, outer_bytes_per_s=self.network_bytes_per_s)
        return cluster_of(self.constants, figures, self.precision, cells=cells)

    @property
    def hidden(self) -> float:
        """Fraction of a pass that can hide communication."""
        return self.constants["hidden"]

    @property
    def framework_settings(self) -> FrameworkSettings:
        """The framework's settings for running a step."""
        return framework_settings(self.framework, self.precision)

    @property
    def of_experts(self) -> bool:
        """Whether it was fitted to mixture-of-experts models, whose matmuls are smaller."""
        return self.name.startswith(f"{self.framework}-experts-")

    @property
    def training_precision(self) -> Precision:
        """Dtypes of parameters, gradients and optimizer state."""
        return training_precision(self.framework, self.precision)

    def interval(self, layouts: Layouts, workload: Workload) -> tuple[Any, Any]:
        """Returns the lower and upper factors of the 90% interval around predicted seconds."""
        inside = self.cluster.tiers.tiers[0].num_devices
        one_host = features(layouts, workload)["devices"] <= (inside or np.inf)
        half = np.where(one_host, self._half_width(True), self._half_width(False))
        half = half * (1 + WIDENING_PER_DOUBLING * self.doublings_outside(layouts, workload))
        return np.exp(-half), np.exp(half)

    def doublings_outside(self, layouts: Layouts, workload: Workload) -> Any:
        """Returns the doublings by which layouts exceed the measured ranges, over all features."""
        total: Any = 0.0
        for _, doublings in self._outside(layouts, workload):
            total = total + doublings
        return total

    def outside(self, layouts: Layouts, workload: Workload) -> tuple[str, ...]:
        """Returns a message for each feature that is outside the measured range in any layout."""
        found = []
        for name, doublings in self._outside(layouts, workload):
            if np.max(doublings) > 0:
                low, high = self.seen[name]
                found.append(
                    f"{name} outside of {low:,.0f} to {high:,.0f}, the range of the measured runs"
                )
        return tuple(found)

    def _outside(self, layouts: Layouts, workload: Workload) -> Iterator[tuple[str, Any]]:
        for name, value in features(layouts, workload).items():
            low, high = self.seen[name]
            beyond = np.maximum(np.log2(value / high), np.log2(low / value))
            yield name, np.maximum(beyond, 0.0)

    def half_width(self) -> float:
        """Returns the log of the interval's factor within measured ranges, over all regimes."""
        if self.half_width_elsewhere is not None:
            return self.half_width_elsewhere
        ratios = [abs(each.log_ratio) for each in self.residuals]
        return conformal_quantile(ratios) if ratios else math.log(2)

    def _half_width(self, one_host: bool) -> float:
        ratios = [abs(each.log_ratio) for each in self.residuals if each.one_host == one_host]
        if self.half_width_elsewhere is not None or len(ratios) < _ENOUGH:
            return self.half_width()
        return conformal_quantile(ratios)


def features(layouts: Layouts, workload: Workload) -> dict[str, Any]:
    """Returns the features whose ranges a calibration records, one value per layout."""
    ones = np.ones(np.shape(layouts.tensor))
    return {
        "devices": layouts.stride("pipeline") * layouts.pipeline * ones,
        "context length": workload.context_length * ones,
        "d_model": workload.shape.d_model * ones,
        "tokens in a pass": workload.tokens / layouts.context * ones,
        "tensor ranks": layouts.tensor * ones,
        "pipeline stages": layouts.pipeline * ones,
        "context ranks": layouts.context * ones,
    }


def ranges(groups: "list[tuple[Layouts, Workload]]") -> dict[str, tuple[float, float]]:
    """Returns the minimum and maximum of each feature over groups of runs."""
    found: dict[str, tuple[float, float]] = {}
    for layouts, workload in groups:
        for name, values in features(layouts, workload).items():
            low, high = found.get(name, (np.inf, -np.inf))
            found[name] = (min(low, float(np.min(values))), max(high, float(np.max(values))))
    return found


_DATA = pathlib.Path(__file__).parents[1] / "data" / "calibrations.jsonl"


@functools.cache
def known_calibrations() -> tuple[FrameworkCalibration, ...]:
    """Returns the calibrations bundled with Paceline, sorted by number of rows, most first."""
    known = read_calibrations(_DATA)
    return tuple(sorted(known, key=lambda each: (-len(each.rows), each.name)))


def match_calibration(
    known: Iterable[FrameworkCalibration],
    device: str,
    precision: str,
    *,
    framework: str | None = None,
) -> FrameworkCalibration | None:
    """Returns the first calibration of a device and dtype, and of a framework unless None."""
    for each in known:
        is_matching = (each.device, each.precision) == (device, precision)
        if is_matching and framework in (None, each.framework):
            return each
    return None


def find_calibration(name: str, device: str, precision: str) -> FrameworkCalibration:
    """Finds a bundled calibration by its name, or by its framework, device and dtype."""
    everything = known_calibrations()
    for each in everything:
        if each.name == name:
            if (each.device, each.precision) != (device_name(device), precision):
                raise UsageError(
                    f"calibration {name} is of {each.device} with {each.precision}, not of "
                    f"{device} with {precision}"
                )
            return each
    of_framework = [each for each in everything if each.framework in (name, family(name))]
    if not of_framework:
        names = [each.name for each in everything]
        hint = did_you_mean(name, {*names, *ALIASES, *(each.framework for each in everything)})
        raise UsageError(f"unknown calibration {name!r}; {hint}known: {', '.join(names)}")
    found = match_calibration(of_framework, device_name(device), precision)
    if found is None:
        pairs = sorted({f"{each.device} {each.precision}" for each in of_framework})
        raise UsageError(
            f"no calibration of {name} for {device} with {precision}; there are: "
            f"{', '.join(pairs)}. paceline plan calibrate makes one from your own runs"
        )
    return found


def read_calibrations(path: pathlib.Path | str) -> list[FrameworkCalibration]:
    """Reads calibrations, one per line."""
    path = pathlib.Path(path)
    made = []
    content = read_named(path, "paceline plan calibrate writes one")
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            made.append(msgspec.json.decode(line, type=FrameworkCalibration))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError) as error:
            raise UsageError(f"{path}, line {number}: not a calibration ({error})") from error
    return made


def write_calibrations(calibrations: Iterable[FrameworkCalibration], path: pathlib.Path) -> None:
    """Writes calibrations, one per line, with six digits of every constant."""
    lines = []
    for each in calibrations:
        constants = {name: float(f"{value:.6g}") for name, value in each.constants.items()}
        lines.append(msgspec.json.encode(msgspec.structs.replace(each, constants=constants)))
    path.write_bytes(b"\n".join(lines) + b"\n")
