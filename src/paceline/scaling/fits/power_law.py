"""Power laws through a few points: N = k C^a, and L = E + K C^-g.

The first is fitted as a line in log space: N spans orders of magnitude, and a fit of N itself would
be dominated by the largest values. The second is linear in E and K for a given g, so only g is
searched. Both fit many replicates at once, one per row; NaN points of a replicate are ignored.
"""

import dataclasses

import numpy as np

from paceline.scaling.surface import Array

_NUM_GRID = 60
_NUM_ZOOMS = 3
_FEWEST_POINTS = 3
_LARGEST_LOG = 300.0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LogLine:
    """Lines log N = level + slope (log C - centre), one per replicate."""

    centre: float
    level: Array
    slope: Array
    squares: Array
    """Sum of squared residuals in log N."""

    def at(self, compute: Array) -> Array:
        """Returns N of every replicate (rows) for every budget (columns)."""
        offset = np.log(compute) - self.centre
        logs = self.level[:, None] + self.slope[:, None] * offset
        # Three points leave a Student distribution without a mean, so draws can be arbitrarily far.
        return np.asarray(np.exp(np.clip(logs, -_LARGEST_LOG, _LARGEST_LOG)))


def fit_log_line(compute: Array, values: Array) -> LogLine:
    """Fits a line to every row of `values` in log space."""
    is_known = np.isfinite(values)
    log_values = np.log(np.where(is_known, values, 1.0))
    centre = float(np.log(compute).mean())
    offset = np.log(compute) - centre
    count = is_known.sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean_x = (is_known * offset).sum(axis=1) / count
        mean_y = (is_known * log_values).sum(axis=1) / count
        x, y = offset - mean_x[:, None], log_values - mean_y[:, None]
        # Fewer than two points give 0/0: the replicate becomes NaN and is dropped.
        slope = (is_known * x * y).sum(axis=1) / (is_known * x**2).sum(axis=1)
    residual = is_known * (y - slope[:, None] * x)
    return LogLine(
        centre=centre, level=mean_y - slope * mean_x, slope=slope, squares=(residual**2).sum(axis=1)
    )


def draw_log_lines(compute: Array, values: Array, num_draws: int, seed: int = 0) -> LogLine:
    """Draws lines from the Student distribution of a least-squares fit to one row of values.

    The percentiles of these draws are the textbook confidence intervals of the regression line.
    """
    line = fit_log_line(compute, values[None])
    offset = np.log(compute) - line.centre
    freedom = len(values) - 2
    generator = np.random.default_rng(seed)
    scale = np.sqrt(line.squares[0] / max(freedom, 1))
    # Level and slope are independent, because log C is centred.
    chi = np.sqrt(generator.chisquare(max(freedom, 1), num_draws) / max(freedom, 1))
    normal = generator.standard_normal((2, num_draws)) / chi
    return LogLine(
        centre=line.centre,
        level=line.level[0] + scale / np.sqrt(len(values)) * normal[0],
        slope=line.slope[0] + scale / np.sqrt((offset**2).sum()) * normal[1],
        squares=np.full(num_draws, line.squares[0]),
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SaturatingLaw:
    """Laws L = floor + height (C/centre)^-exponent, one per replicate."""

    centre: float
    floor: Array
    height: Array
    exponent: Array

    def at(self, compute: Array) -> Array:
        """Returns the loss of every replicate (rows) for every budget (columns)."""
        power = (compute / self.centre) ** -self.exponent[:, None]
        return np.asarray(self.floor[:, None] + self.height[:, None] * power)

    def compute_for(self, loss: Array) -> Array:
        """Returns the compute at which the first law reaches each loss."""
        reducible = (loss - self.floor[0]) / self.height[0]
        return np.asarray(self.centre * reducible ** (-1 / self.exponent[0]))


def fit_saturating_law(compute: Array, losses: Array) -> SaturatingLaw:
    """Fits every row of `losses` by relative error, with a non-negative floor."""
    centre = float(np.exp(np.log(compute).mean()))
    ratio = np.log(compute / centre)
    is_known = np.isfinite(losses)
    # Two points do not determine the law: the result is NaN for replicates with fewer than three.
    is_determined = is_known.sum(axis=1) >= _FEWEST_POINTS
    is_known = is_known | ~is_determined[:, None]
    safe = np.where(is_known & is_determined[:, None], losses, 1.0)
    weights = is_known / safe**2
    low, high = np.full(len(losses), 0.005), np.full(len(losses), 1.5)
    for _ in range(_NUM_ZOOMS):
        steps = np.linspace(0, 1, _NUM_GRID)
        grid = low[:, None] * (high / low)[:, None] ** steps
        _floor, _height, squares = _solve_law(grid, ratio, weights, safe)
        best = squares.argmin(axis=1)
        rows = np.arange(len(losses))
        low = grid[rows, np.maximum(best - 1, 0)]
        high = grid[rows, np.minimum(best + 1, _NUM_GRID - 1)]
    exponent = grid[rows, best]
    floor, height, _squares = _solve_law(exponent[:, None], ratio, weights, safe)
    return SaturatingLaw(
        centre=centre,
        floor=np.where(is_determined, floor[:, 0], np.nan),
        height=height[:, 0],
        exponent=exponent,
    )


def _solve_law(
    exponents: Array, ratio: Array, weights: Array, losses: Array
) -> tuple[Array, Array, Array]:
    """Solves for floor and height at each exponent of a grid, per replicate."""
    power = np.exp(-exponents[:, :, None] * ratio)
    total = weights.sum(axis=1)[:, None]
    first = np.einsum("rgb,rb->rg", power, weights)
    second = np.einsum("rgb,rb->rg", power**2, weights)
    moment = (weights * losses).sum(axis=1)[:, None]
    moment_power = np.einsum("rgb,rb->rg", power, weights * losses)
    determinant = total * second - first**2
    with np.errstate(invalid="ignore", divide="ignore"):
        floor = (second * moment - first * moment_power) / determinant
        height = (total * moment_power - first * moment) / determinant
        through_zero = moment_power / second
    is_bound = ~(floor >= 0)
    floor, height = np.where(is_bound, 0.0, floor), np.where(is_bound, through_zero, height)
    residual = losses[:, None, :] - floor[..., None] - height[..., None] * power
    return floor, height, np.einsum("rgb,rb->rg", residual**2, weights)
