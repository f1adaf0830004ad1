"""Automatic choice of the bucket size from measurements of the group and the model.

1. When the container is created, all-reduces of growing sizes measure the call overhead, latency
   and bandwidth of its group.
2. The first synchronised steps record when each gradient arrives.
3. `simulate_buckets` simulates the buckets of every candidate size. The size with the lowest
   predicted cost wins: exposed communication plus the time that the program spends launching calls.

Measurements are reduced to their maximum over the ranks, and all ranks adopt the first rank's
choice.

The simulation omits contention. The slowdown of compute by transfers is already in the arrival
times, which are observed while buckets are in flight. The slowdown of transfers by compute is
known only from `paceline calibrate`, which takes a minute. On the committed calibrations (24 cases
of model, batch, ranks and link) the size chosen without contention is predicted to cost at most
2.2% of a step more than the best one, 0.3% on average: tests/unit/predict/test_bucket_size.py.
"""

import dataclasses
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from paceline.accounting.collectives import CollectiveFit, fit_collective
from paceline.accounting.overlap import simulate_buckets
from paceline.core.units import MIB, format_decimal
from paceline.devices.accelerator import synchronize
from paceline.parallel.buckets import TensorSpec, plan_buckets
from paceline.parallel.ranks.collectives import reduce_numbers
from paceline.parallel.reducer import Settings

CANDIDATES_MB = (0.25, 0.5, 1, 2, 3, 4, 5, 7, 10, 15, 25, 50, 100, 250, 1000)

_SMALLEST_BYTES = 4 * 2**10
_LARGEST_BYTES = 64 * MIB
_GROWTH = 4
_REPETITIONS = 5
_LONG_CALL_S = 0.2  # A rate-limited link transmits the first few MiB faster than the rest.
_WARMUP_STEPS = 1
_OBSERVED_STEPS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupCost:
    """The measured cost of all-reduces in one group."""

    fit: CollectiveFit
    start_s: float
    """Time that the program spends launching one call."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """The predicted performance of one bucket size."""

    num_buckets: int
    exposed_s: float
    """Exposed communication."""
    cost_s: float
    """Exposed communication plus the time that the program spends launching calls."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BucketSizeChoice:
    """A chosen bucket size and the measurements behind the choice."""

    bucket_size_mb: float
    backward_s: float
    latency_s: float
    bytes_per_s: float | None
    start_s: float
    candidates: dict[float, "Candidate"]
    """Prediction for each candidate size in MiB."""

    def explain(self) -> str:
        """Returns a description of the choice and its reasons."""
        bandwidth = (
            "a bandwidth too high to measure"
            if self.bytes_per_s is None
            else format_decimal(self.bytes_per_s, "B/s")
        )
        candidates = "; ".join(
            f"{size:g} MiB {candidate.cost_s * 1e3:.1f} ms in {candidate.num_buckets} buckets"
            for size, candidate in self.candidates.items()
        )
        return (
            f"buckets of {self.bucket_size_mb:g} MiB: backward takes {self.backward_s * 1e3:.0f} "
            f"ms, an all-reduce has a latency of {self.latency_s * 1e3:.2f} ms and {bandwidth}, "
            f"launching one takes {self.start_s * 1e3:.2f} ms of the program's time; predicted "
            f"costs: {candidates}"
        )


def measure_group(group: dist.ProcessGroup, device: torch.device) -> GroupCost:
    """Times all-reduces of growing sizes until one takes long; collective over all ranks."""
    samples: dict[int, list[float]] = {}
    starts: list[float] = []
    size = _SMALLEST_BYTES
    while size <= _LARGEST_BYTES:
        message = torch.zeros(size // 4, device=device)
        dist.all_reduce(message, group=group)
        times = []
        for _ in range(_REPETITIONS):
            synchronize(device)
            began = time.perf_counter()
            work = dist.all_reduce(message, group=group, async_op=True)
            assert work is not None
            starts.append(time.perf_counter() - began)
            work.wait()
            synchronize(device)
            times.append(time.perf_counter() - began)
        samples[size] = reduce_numbers(times, dist.ReduceOp.MAX, device, group)
        if statistics.median(samples[size]) > _LONG_CALL_S:
            break
        size *= _GROWTH
    return GroupCost(
        fit=fit_collective(samples),
        start_s=reduce_numbers([statistics.median(starts)], dist.ReduceOp.MAX, device, group)[0],
    )


class BucketSizeTuner:
    """Observes the first steps of a container and chooses its bucket size."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._cost = measure_group(settings.group, settings.device)
        self._arrivals: list[Sequence[float]] = []

    @property
    def has_seen_enough(self) -> bool:
        """Whether enough steps have been observed for a choice."""
        return len(self._arrivals) >= _WARMUP_STEPS + _OBSERVED_STEPS

    def observe(self, arrivals_s: Sequence[float]) -> None:
        """Records the arrival time of each gradient in one step."""
        self._arrivals.append(arrivals_s)

    def forget(self) -> None:
        """Discards all observations, because the set of trained parameters has changed."""
        self._arrivals.clear()

    def choose(self, tensors: Sequence[TensorSpec]) -> BucketSizeChoice:
        """Returns the same choice on all ranks; collective over all ranks."""
        observed = self._arrivals[_WARMUP_STEPS:]
        medians = [statistics.median(times) for times in zip(*observed, strict=True)]
        group, device = self._settings.group, self._settings.device
        choice = choose_bucket_size(
            tensors,
            reduce_numbers(medians, dist.ReduceOp.MAX, device, group),
            self._cost,
            reduction_dtype=self._settings.reduction_dtype,
        )
        agreed: list[BucketSizeChoice] = [choice]
        dist.broadcast_object_list(agreed, group=group, device=device, group_src=0)
        return agreed[0]


def choose_bucket_size(
    tensors: Sequence[TensorSpec],
    arrivals_s: Sequence[float],
    cost: GroupCost,
    *,
    reduction_dtype: torch.dtype | None = None,
) -> BucketSizeChoice:
    """Simulates every candidate size and returns the best; a pure function of measurements."""
    backward_s = max(arrivals_s)
    candidates: dict[float, Candidate] = {}
    for size in CANDIDATES_MB:
        plans = plan_buckets(tensors, size * MIB)
        exposed_s = simulate_buckets(
            [max(arrivals_s[slot.tensor] for slot in plan.slots) for plan in plans],
            [cost.fit.time_s(plan.message_bytes(reduction_dtype)) for plan in plans],
            backward_s,
        ).exposed_s
        candidates[size] = Candidate(
            num_buckets=len(plans),
            exposed_s=exposed_s,
            cost_s=exposed_s + len(plans) * cost.start_s,
        )
    # Among sizes of equal cost, the larger one sends fewer messages.
    best = min(CANDIDATES_MB, key=lambda size: (candidates[size].cost_s, -size))
    last = cost.fit.segments[-1]
    return BucketSizeChoice(
        bucket_size_mb=best,
        backward_s=backward_s,
        latency_s=cost.fit.segments[0].latency_s.value,
        bytes_per_s=None if last.bytes_per_s is None else last.bytes_per_s.value,
        start_s=cost.start_s,
        candidates=candidates,
    )
