"""Finds layouts with indistinguishable predictions, and explains why one layout is slower."""

import dataclasses
import math
from collections.abc import Sequence

from paceline.planner.search.choice import Choice
from paceline.planner.search.costs import Costs
from paceline.planner.search.question import SearchQuestion, parse_fixed
from paceline.planner.search.search import NoLayoutError, search


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """The best layout compared with the best layout that has given fields."""

    asked: str
    """The given fields, as text."""
    best: Choice
    other: Choice
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


def not_told_apart(found: Sequence[Choice]) -> int:
    """Returns the number of leading choices whose intervals overlap that of the best."""
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
    """Compares the best layout with the best one that has the given fields.

    If none with these fields fits, the memory limit is ignored.

    Args:
        asked: Fields such as ``tp=8,pp=2``.
        best: The chosen layout.
        question: The search question.
        costs: Achieved rates of devices and links.
        peak_flops: Stated peak FLOP/s of a device.
    """
    fixed = dataclasses.replace(question, fixed=parse_fixed(asked))
    try:
        other = search(fixed, costs, top=1, peak_flops=peak_flops).best
    except NoLayoutError as error:
        # This search raises again if no layout divides the work.
        unlimited = dataclasses.replace(fixed, memory_bytes=math.inf)
        fastest = search(unlimited, costs, top=1, peak_flops=peak_flops).best
        other = dataclasses.replace(fastest, capacity_bytes=question.memory_bytes)
        return Comparison(asked=asked, best=best, other=other, least_bytes=error.least_bytes)
    return Comparison(asked=asked, best=best, other=other)
