"""Advice from repeated searches: single changes, the Pareto front, and why a layout is slower."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from paceline.planner.search.search import Candidate, NoLayoutError, find_best, search
from paceline.planner.search.spec import PerformanceModel, SearchSpec, parse_fixed

_FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variation:
    """A spec and performance with one change."""

    what: str
    spec: SearchSpec
    performance: PerformanceModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """One change and its effect."""

    what: str
    choice: Candidate
    speedup: float
    """Tokens per second relative to the best layout without the change."""
    device_hours: float
    """Device-hours for the same tokens, relative to those without the change."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrontPoint:
    """The best layout for one number of devices."""

    devices: int
    choice: Candidate
    seconds_per_token: float
    device_seconds_per_token: float
    on_front: bool
    """Whether no other number of devices is at least as fast and as cheap, and better in one."""


def variations(
    best: Candidate,
    spec: SearchSpec,
    performance: PerformanceModel,
    lower_precision: PerformanceModel | None = None,
) -> Iterator[Variation]:
    """Yields possible changes to the spec or the performance."""

    def asked(what: str, **changes: object) -> Variation:
        return Variation(
            what=what,
            spec=dataclasses.replace(spec, **changes),  # type: ignore[arg-type]
            performance=performance,
        )

    count, batch = spec.num_devices, spec.global_batch
    yield asked(f"{2 * count:,} devices", num_devices=2 * count)
    if count > 1:
        yield asked(f"{count // 2:,} devices", num_devices=count // 2)
    tokens = 2 * batch * spec.context_length
    yield asked(f"a batch twice as large ({tokens / 2**20:.3g}M tokens)", global_batch=2 * batch)
    if lower_precision is not None:
        name = "float8 matmuls"
        yield Variation(what=name, spec=spec, performance=lower_precision)
    if count > spec.devices_per_host:
        faster = performance.with_network(2 * performance.network_bytes_per_s)
        yield Variation(what="a network twice as fast", spec=spec, performance=faster)
    yield asked("twice the memory per device", memory_bytes=2 * spec.memory_bytes)
    larger = 2 * best.batch.num_sequences
    if best.batch.accumulation_steps % 2 == 0:
        yield asked(f"micro-batches of {larger}", fixed={"micro_batch": larger})


def sensitivity(
    best: Candidate,
    spec: SearchSpec,
    offered: Iterable[Variation],
    done: Callable[[], None] = lambda: None,
) -> list[Change]:
    """Searches again with each change and returns the changes, fastest first.

    Changes without a layout that fits are omitted. `done` is called after each search.
    """
    changes = []
    for variation in offered:
        found = find_best(variation.spec, variation.performance)
        done()
        if found is None:
            continue
        speedup = found.tokens_per_s / best.tokens_per_s
        more_devices = variation.spec.num_devices / spec.num_devices
        changes.append(
            Change(
                what=variation.what,
                choice=found,
                speedup=speedup,
                device_hours=more_devices / speedup,
            )
        )
    return sorted(changes, key=lambda change: -change.speedup)


def pareto_front(
    spec: SearchSpec,
    performance: PerformanceModel,
    counts: Sequence[int] | None = None,
    peak_flops: float | None = None,
) -> list[FrontPoint]:
    """Returns the best layout for each device count that has one, marking the Pareto front.

    Without `counts`, there are 1/8 to 8 times as many devices as in the spec.
    """
    if counts is None:
        multiples = {math.floor(spec.num_devices * factor) for factor in _FACTORS}
        counts = sorted(multiples - {0})
    found: list[tuple[int, Candidate]] = []
    for count in counts:
        best = find_best(dataclasses.replace(spec, num_devices=count), performance, peak_flops)
        if best is not None:
            found.append((count, best))
    times = [1 / choice.tokens_per_s for _, choice in found]
    prices = [count * seconds for (count, _), seconds in zip(found, times, strict=True)]
    return [
        FrontPoint(
            devices=count,
            choice=choice,
            seconds_per_token=seconds,
            device_seconds_per_token=price,
            on_front=not any(
                time <= seconds and other <= price and (time, other) != (seconds, price)
                for time, other in zip(times, prices, strict=True)
            ),
        )
        for (count, choice), seconds, price in zip(found, times, prices, strict=True)
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """The best layout compared with the best layout that has given fields."""

    asked: str
    """The given fields, as text."""
    best: Candidate
    other: Candidate
    """The fastest layout with these fields that fits, or the fastest of all if none fits."""
    least_bytes: float | None = None
    """Peak memory of the smallest layout with these fields, if none fits a device; else None."""

    @property
    def fits(self) -> bool:
        """Whether any layout with these fields fits a device."""
        return self.least_bytes is None

    @property
    def slowdown(self) -> float:
        """Relative increase of the step time over the best layout."""
        return self.other.step_time_s.value / self.best.step_time_s.value - 1

    @property
    def reason(self) -> str:
        """The main reason not to choose the other layout."""
        if self.least_bytes is not None:
            missing = self.least_bytes / self.other.capacity_bytes - 1
            return f"even the smallest needs {missing:.0%} more memory than a device has"
        mine, others = self.best.parts, self.other.parts
        more = {name: others.get(name, 0.0) - mine.get(name, 0.0) for name in {**mine, **others}}
        worst = max(more, key=more.__getitem__)
        if self.slowdown <= 0:
            return "it is as fast"
        share = more[worst] / self.best.step_time_s.value
        return f"a step takes {self.slowdown:.0%} longer, most of it {worst} ({share:+.0%})"


def not_told_apart(found: Sequence[Candidate]) -> int:
    """Returns the number of leading choices whose intervals overlap that of the best."""
    best = found[0].step_time_s
    most = best.value if best.high is None else best.high
    lows = [
        each.step_time_s.value if each.step_time_s.low is None else each.step_time_s.low
        for each in found
    ]
    return next((place for place, low in enumerate(lows) if low > most), len(lows))


def compare(
    asked: str,
    best: Candidate,
    spec: SearchSpec,
    performance: PerformanceModel,
    peak_flops: float | None,
) -> Comparison:
    """Compares the best layout with the best one that has the given fields.

    If none with these fields fits, the memory limit is ignored.
    """
    fixed = dataclasses.replace(spec, fixed=parse_fixed(asked))
    try:
        other = search(fixed, performance, top=1, peak_flops=peak_flops).best
    except NoLayoutError as error:
        # This search raises again if no layout divides the work.
        unlimited = dataclasses.replace(fixed, memory_bytes=math.inf)
        fastest = search(unlimited, performance, top=1, peak_flops=peak_flops).best
        other = dataclasses.replace(fastest, capacity_bytes=spec.memory_bytes)
        return Comparison(asked=asked, best=best, other=other, least_bytes=error.least_bytes)
    return Comparison(asked=asked, best=best, other=other)
