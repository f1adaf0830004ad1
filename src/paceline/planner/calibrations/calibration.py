"""Calibration of a framework on a device: fitted constants, source rows and held-out residuals.

The prediction interval is the 90% quantile of the errors of rows predicted with their model held
out. It uses runs in the same regime (one host or several hosts) if there are enough of them.
Outside the range of the measured rows the interval widens: by half its width for each doubling of
devices, sequence length, model width, tokens per pass or a mesh axis beyond that range.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from paceline.accounting.intervals import conformal_quantile
from paceline.core.specs import Precision
from paceline.planner.calibrations.framework_settings import (
    FrameworkSettings,
    framework_settings,
    training_precision,
)
from paceline.predict.cost.cluster import Cluster
from paceline.predict.cost.layouts import Layouts, Workload

WIDENING_PER_DOUBLING = 0.5
_ENOUGH = 15
"""Minimum number of residuals for a regime to use its own quantile."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Residual:
    """Error of one row, predicted with its model held out."""

    row: str
    model: str
    one_host: bool
    log_ratio: float
    """Logarithm of measured over predicted seconds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrameworkCalibration:
    """Step-time constants of one framework, device and dtype."""

    name: str
    framework: str
    device: str
    """Name in the hardware table, if the table lists the device."""
    precision: str
    """dtype of matmuls: bfloat16, float16, float8, float4."""
    cluster: Cluster
    hidden: float
    """Fraction of a pass that can hide communication."""
    rows: tuple[str, ...]
    """Fitted rows of this device and dtype."""
    residuals: tuple[Residual, ...]
    """Residuals of these rows, or of all rows fitted together if there are too few."""
    seen: Mapping[str, tuple[float, float]]
    """Minimum and maximum of each feature over the measured rows."""
    constants: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Fitted constants. Shares are fractions of the vendor's stated figures."""

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
        ratios = [abs(each.log_ratio) for each in self.residuals]
        return conformal_quantile(ratios) if ratios else math.log(2)

    def _half_width(self, one_host: bool) -> float:
        ratios = [abs(each.log_ratio) for each in self.residuals if each.one_host == one_host]
        if len(ratios) < _ENOUGH:
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
