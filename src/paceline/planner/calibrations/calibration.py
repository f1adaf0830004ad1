"""What a framework reaches on a device, with the rows that say so and how far off they were.

The interval of a prediction comes from rows that were predicted while their model was held out:
the 90% quantile of their errors, of runs in the same regime (one host, several hosts) where there
are enough of them. Beyond what was seen it widens: for every doubling by which devices, sequence,
width, tokens in a pass or a mesh axis lie outside of all rows, by half of itself.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core.specs import Precision
from paceline.planner.calibrations.conventions import Conventions, conventions, training_precision
from paceline.planner.cost.cluster import Cluster
from paceline.planner.cost.layouts import Layouts, Workload

COVERAGE = 0.9
WIDENING_PER_DOUBLING = 0.5
_ENOUGH = 15
"""Residuals of one regime from which its own quantile is taken."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Residual:
    """How far off a row was, predicted without its model."""

    row: str
    model: str
    one_host: bool
    log_ratio: float
    """Logarithm of measured over predicted seconds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrameworkCalibration:
    """Constants of the step time for one framework, device and dtype."""

    name: str
    framework: str
    device: str
    """Name in the hardware table, where it is there."""
    precision: str
    """dtype of matmuls: bfloat16, float16, float8, float4."""
    cluster: Cluster
    hidden: float
    """Share of a pass that hides communication."""
    rows: tuple[str, ...]
    """Rows of this device and dtype that it was fitted to."""
    residuals: tuple[Residual, ...]
    """Of these rows, or of the whole framework where this device and dtype have too few."""
    seen: Mapping[str, tuple[float, float]]
    """Least and most of every quantity that a prediction may leave."""
    constants: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The fitted constants, shares of what the vendor states."""

    @property
    def conventions(self) -> Conventions:
        """How the framework runs a step."""
        return conventions(self.framework)

    @property
    def of_experts(self) -> bool:
        """Whether it was fitted to mixtures of experts, whose matmuls are smaller."""
        return self.name.startswith(f"{self.framework}-experts-")

    @property
    def training_precision(self) -> Precision:
        """Dtypes of parameters, gradients and optimizer."""
        return training_precision(self.framework, self.precision)

    def interval(self, layouts: Layouts, workload: Workload) -> tuple[Any, Any]:
        """Returns the factors on predicted seconds between which 90% of such runs should lie."""
        inside = self.cluster.tiers.tiers[0].num_devices
        one_host = features(layouts, workload)["devices"] <= (inside or np.inf)
        half = np.where(one_host, self._half_width(True), self._half_width(False))
        half = half * (1 + WIDENING_PER_DOUBLING * self.doublings_outside(layouts, workload))
        return np.exp(-half), np.exp(half)

    def doublings_outside(self, layouts: Layouts, workload: Workload) -> Any:
        """Returns by how many doublings, all quantities together, layouts leave what was seen."""
        total: Any = 0.0
        for _, doublings in self._outside(layouts, workload):
            total = total + doublings
        return total

    def outside(self, layouts: Layouts, workload: Workload) -> tuple[str, ...]:
        """Says which quantities of any of the layouts lie outside of the rows, and how far."""
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
        """Returns the logarithm of the interval's factor inside of what was seen, all regimes."""
        return half_width(np.array([abs(each.log_ratio) for each in self.residuals]))

    def _half_width(self, one_host: bool) -> float:
        ratios = [abs(each.log_ratio) for each in self.residuals if each.one_host == one_host]
        if len(ratios) < _ENOUGH:
            return self.half_width()
        return half_width(np.array(ratios))


def half_width(ratios: npt.NDArray[np.float64]) -> float:
    """Returns the split-conformal quantile of absolute residuals: the ceil(0.9 (n + 1))-th.

    Fewer than nine residuals have none so far out: then it is the largest, times that place over n.
    """
    if not len(ratios):
        return float(np.log(2))
    place = int(np.ceil(COVERAGE * (len(ratios) + 1)))
    ordered = np.sort(ratios)
    if place > len(ordered):
        return float(ordered[-1]) * place / len(ordered)
    return float(ordered[place - 1])


def features(layouts: Layouts, workload: Workload) -> dict[str, Any]:
    """Returns the quantities whose range a calibration remembers, by layout."""
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
    """Returns least and most of every feature over groups of runs."""
    found: dict[str, tuple[float, float]] = {}
    for layouts, workload in groups:
        for name, values in features(layouts, workload).items():
            low, high = found.get(name, (np.inf, -np.inf))
            found[name] = (min(low, float(np.min(values))), max(high, float(np.max(values))))
    return found
