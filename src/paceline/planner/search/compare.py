"""Which layouts cannot be told apart, and why one is slower than another."""

import dataclasses
import math
from collections.abc import Sequence

from paceline.planner.search.choice import Choice
from paceline.planner.search.costs import Costs
from paceline.planner.search.question import SearchQuestion, parse_fixed
from paceline.planner.search.search import NoLayoutError, search


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """The best layout beside the best of those with given fields."""

    asked: str
    """The fields, as they were given."""
    best: Choice
    other: Choice
    """The fastest that fits; if none does, the fastest if memory were no limit."""
    least_bytes: float | None = None
    """What the smallest of the others holds, if none of them fits a device."""

    @property
    def fits(self) -> bool:
        """Whether any of the others fits a device."""
        return self.least_bytes is None

    @property
    def slowdown(self) -> float:
        """How much longer a step of the other takes, as a share of the best."""
        return self.other.step_time_s.value / self.best.step_time_s.value - 1

    @property
    def reason(self) -> str:
        """The one thing that speaks most against the other layout."""
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


def not_told_apart(found: Sequence[Choice]) -> int:
    """Returns how many of the fastest have an interval that overlaps that of the best."""
    best = found[0].step_time_s
    most = best.value if best.high is None else best.high
    lows = [
        each.step_time_s.value if each.step_time_s.low is None else each.step_time_s.low
        for each in found
    ]
    return next((place for place, low in enumerate(lows) if low > most), len(lows))


def compare(
    asked: str, best: Choice, question: SearchQuestion, costs: Costs, peak_flops: float | None
) -> Comparison:
    """Searches among layouts with these fields only; beyond the memory if none fits it.

    Args:
        asked: Fields such as ``tp=8,pp=2``.
        best: The layout that was chosen.
        question: What it was chosen for.
        costs: What devices and links reach.
        peak_flops: Stated FLOP/s of a device.
    """
    fixed = dataclasses.replace(question, fixed=parse_fixed(asked))
    try:
        other = search(fixed, costs, top=1, peak_flops=peak_flops).best
    except NoLayoutError as error:
        # Raises again where nothing divides.
        unlimited = dataclasses.replace(fixed, memory_bytes=math.inf)
        fastest = search(unlimited, costs, top=1, peak_flops=peak_flops).best
        other = dataclasses.replace(fastest, capacity_bytes=question.memory_bytes)
        return Comparison(asked=asked, best=best, other=other, least_bytes=error.least_bytes)
    return Comparison(asked=asked, best=best, other=other)
