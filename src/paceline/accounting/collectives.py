"""Cost formulas of collectives, in the conventions of nccl-tests, and their fit to measurements.

p ranks exchange S bytes over links that carry W bytes per second in each direction, with a
latency alpha per hop. S is counted as in nccl-tests: the whole result of an all-gather, the
whole input of a reduce-scatter, one rank's buffer otherwise. All functions accept arrays.

    ring all-reduce                 2(p-1) alpha + 2(p-1)/p S/W
    ring all-gather, reduce-scatter  (p-1) alpha +  (p-1)/p S/W
    pairwise all-to-all              (p-1) alpha +  (p-1)/p S/W
    reduce_to_owners, gather_from_owners: as reduce-scatter and all-gather
    pipelined broadcast, reduce      (p-1) alpha +          S/W
    double tree all-reduce    2 ceil(log2 p) alpha +       2 S/W

The algorithm bandwidth is S/t. The bus bandwidth multiplies it by the share of S that each link
must carry, so that a perfect collective reaches W for every p.

One line through all sizes does not fit: libraries switch algorithms with the size, and large
messages do not fit into caches. Up to three segments have their own t = latency + S/bandwidth, of
minimal relative error, so that a kilobyte counts as much as a gigabyte. A split must justify its
parameters (Bayesian information criterion, with a floor below which errors are noise) and leave at
least three sizes in every segment. Intervals come from a bootstrap over the repetitions.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.accounting.intervals import bootstrap_medians
from paceline.core.errors import UsageError
from paceline.core.finding import Finding
from paceline.core.plan import Estimate
from paceline.core.strategies import Operation

Numbers: TypeAlias = "npt.NDArray[np.float64] | npt.NDArray[np.int64] | float | int"


def bus_factor(operation: Operation, world_size: Numbers) -> Any:
    """Returns the ratio of bus bandwidth to algorithm bandwidth."""
    ranks = np.asarray(world_size, dtype=np.float64)
    if operation == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if operation not in ("broadcast", "reduce"):
        return (ranks - 1) / ranks
    return np.where(ranks > 1, 1.0, 0.0)


def ring_time_s(
    operation: Operation,
    size_bytes: Numbers,
    world_size: Numbers,
    *,
    latency_s: Numbers,
    bytes_per_s: Numbers,
) -> Any:
    """Returns the seconds of a collective on a ring (pipelined, for broadcast and reduce)."""
    ranks = np.asarray(world_size, dtype=np.float64)
    hops = (ranks - 1) * (2 if operation == "all_reduce" else 1)
    return hops * latency_s + bus_factor(operation, ranks) * np.asarray(size_bytes) / bytes_per_s


def tree_all_reduce_time_s(
    size_bytes: Numbers, world_size: Numbers, *, latency_s: Numbers, bytes_per_s: Numbers
) -> Any:
    """Returns the seconds of an all-reduce over two complementary trees."""
    ranks = np.asarray(world_size, dtype=np.float64)
    transfer = np.where(ranks > 1, 2 * np.asarray(size_bytes) / bytes_per_s, 0.0)
    return 2 * np.ceil(np.log2(ranks)) * latency_s + transfer


Array = npt.NDArray[np.float64]

_MAX_SEGMENTS = 3
_SIZES_PER_SEGMENT = 2
_NOISE_FLOOR = 0.02
_BOOTSTRAP_DRAWS = 1000
# A latency above this means that the set-up of the communicator was timed.
_SETUP_LATENCY_S = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """A range of sizes with one latency and one bandwidth."""

    smallest_bytes: float
    largest_bytes: float
    latency_s: Estimate
    bytes_per_s: Estimate | None
    """Algorithm bandwidth; None if the time does not grow with the size."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveFit:
    """A piecewise fit: segments in order of size."""

    segments: tuple[Segment, ...]
    max_relative_error: float
    """Largest error over the measured sizes."""

    def time_s(self, size_bytes: float) -> float:
        """Predicts the seconds for a size, from the segment that contains it or is nearest."""
        chosen = self.segments[0]
        for left, right in itertools.pairwise(self.segments):
            # The border between two segments is the geometric mean of the adjacent sizes.
            if size_bytes > np.sqrt(left.largest_bytes * right.smallest_bytes):
                chosen = right
        if chosen.bytes_per_s is None:
            return chosen.latency_s.value
        return chosen.latency_s.value + size_bytes / chosen.bytes_per_s.value


def fit_collective(samples: Mapping[int, Sequence[float]]) -> CollectiveFit:
    """Fits the seconds of repeated calls, given by size in bytes."""
    if len(samples) < _SIZES_PER_SEGMENT:
        raise UsageError("a fit of latency and bandwidth needs at least two sizes")
    sizes = np.array(sorted(samples), dtype=np.float64)
    times = np.array([np.median(samples[int(size)]) for size in sizes])
    cuts = min(_possible_cuts(len(sizes)), key=lambda cuts: _criterion(sizes, times, cuts))
    generator = np.random.default_rng(0)
    draws = np.stack(
        [
            bootstrap_medians(np.asarray(samples[int(size)]), _BOOTSTRAP_DRAWS, generator)
            for size in sizes
        ],
        axis=1,
    )
    segments = []
    errors = []
    for part in _parts(cuts, len(sizes)):
        latency, inverse = (float(value[0]) for value in _fit_line(sizes[part], times[None, part]))
        latencies, inverses = _fit_line(sizes[part], draws[:, part])
        grows = inverse > 0 and bool((inverses > 0).all())
        if not grows:
            # The latency of a line with a slope is wrong without the slope: fit a constant.
            inverse = 0.0
            latency = float(_fit_constant(times[None, part])[0])
            latencies = _fit_constant(draws[:, part])
        errors.append(np.abs(latency + inverse * sizes[part] - times[part]) / times[part])
        segments.append(
            Segment(
                smallest_bytes=float(sizes[part][0]),
                largest_bytes=float(sizes[part][-1]),
                latency_s=_interval(latency, latencies),
                bytes_per_s=_interval(1 / inverse, 1 / inverses) if grows else None,
            )
        )
    return CollectiveFit(
        segments=tuple(segments), max_relative_error=float(np.concatenate(errors).max())
    )


def find_warnings(
    fit: CollectiveFit, *, bus_bytes_per_s: float, line_bytes_per_s: float | None
) -> list[Finding]:
    """Returns warnings about implausible measurements of a collective."""
    warnings = []

    def warn(name: str, message: str, remedy: str = "use larger sizes") -> None:
        warnings.append(Finding(name=name, message=message, remedy=remedy))

    latency = fit.segments[0].latency_s.value
    if latency > _SETUP_LATENCY_S:
        message = f"a message without bytes would take {latency * 1e3:.0f} ms: the set-up of "
        warn("timed_setup", f"{message}the communicator was timed", "warm up before measuring")
    if any(segment.bytes_per_s is None for segment in fit.segments):
        message = "the time does not grow with the size: only latency was measured"
        warn("undetermined_bandwidth", message)
    if line_bytes_per_s is not None and bus_bytes_per_s > 1.02 * line_bytes_per_s:
        warn(
            "above_line_rate",
            f"a bus bandwidth of {bus_bytes_per_s / 1e9:.3g} GB/s on a line of "
            f"{line_bytes_per_s / 1e9:.3g} GB/s: the messages fit into buffers, or the call "
            "was not waited for",
        )
    return warnings


def _possible_cuts(num_sizes: int) -> list[tuple[int, ...]]:
    possible = []
    for num_cuts in range(_MAX_SEGMENTS):
        for cuts in itertools.combinations(range(1, num_sizes), num_cuts):
            lengths = np.diff([0, *cuts, num_sizes])
            # Two points always fit a line, so each segment needs a third to judge a split.
            if num_cuts == 0 or lengths.min() > _SIZES_PER_SEGMENT:
                possible.append(cuts)
    return possible


def _parts(cuts: tuple[int, ...], num_sizes: int) -> list[slice]:
    return [slice(begin, end) for begin, end in itertools.pairwise([0, *cuts, num_sizes])]


def _criterion(sizes: Array, times: Array, cuts: tuple[int, ...]) -> float:
    squares = 0.0
    for part in _parts(cuts, len(sizes)):
        latency, inverse = _fit_line(sizes[part], times[None, part])
        squares += float(np.sum(((latency + inverse * sizes[part]) / times[part] - 1) ** 2))
    num_parameters = 3 * len(cuts) + 2
    mean_square = squares / len(sizes) + _NOISE_FLOOR**2
    return float(len(sizes) * np.log(mean_square) + num_parameters * np.log(len(sizes)))


def _fit_line(sizes: Array, times: Array) -> tuple[Array, Array]:
    """Fits non-negative latency and seconds per byte to each row of times."""
    weights = 1 / times
    slopes = sizes / times
    ww, ws, ss = (weights**2).sum(1), (weights * slopes).sum(1), (slopes**2).sum(1)
    w, s = weights.sum(1), slopes.sum(1)
    determinant = ww * ss - ws**2
    safe = np.where(determinant > 0, determinant, 1.0)
    latency = np.where(determinant > 0, (ss * w - ws * s) / safe, 0.0)
    inverse = np.where(determinant > 0, (ww * s - ws * w) / safe, s / ss)
    # If the unconstrained fit has a negative parameter, that parameter is zero in the best one.
    inverse = np.where(latency < 0, s / ss, inverse)
    latency = np.where(inverse <= 0, _fit_constant(times), np.maximum(latency, 0.0))
    return latency, np.maximum(inverse, 0.0)


def _fit_constant(times: Array) -> Array:
    """Fits one time, independent of the size, to each row of times."""
    weights = 1 / times
    return np.asarray(weights.sum(1) / (weights**2).sum(1))


def _interval(value: float, draws: Array) -> Estimate:
    low, high = np.percentile(draws, [2.5, 97.5])
    return Estimate(value=value, low=min(float(low), value), high=max(float(high), value))
