"""Schedule of checkpoint saves per tier, and the saves that can be loaded after a failure.

Saves are numbered from the start of the run: every save goes to the first tier, every m-th to the
second, and so on. Positions are computed in closed form instead of save by save, so the cost of
simulating a run depends only on its number of failures.
"""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tier:
    """A destination for checkpoints."""

    name: str
    """memory, disk or s3."""
    stall_s: float
    """Time for which a save stops training."""
    write_s: float
    """Time from the end of the stall until the save can be loaded."""
    load_s: float
    """Time to load a save on all devices at once."""
    is_volatile: bool = False
    """Whether a failure of neighbouring hosts loses the save, as with a copy in a peer's memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cadence:
    """Saves after every interval of training. Tier i gets every multiples[i]-th save."""

    interval_s: float
    tiers: tuple[Tier, ...]
    multiples: tuple[int, ...]

    def time_s(self, first: int, count: int) -> float:
        """Returns the duration of `count` intervals with their saves after save number `first`."""
        stalls = sum(
            tier.stall_s * ((first + count) // multiple - first // multiple)
            for tier, multiple in zip(self.tiers, self.multiples, strict=True)
        )
        return count * self.interval_s + stalls

    def saves_within(self, first: int, up_s: float) -> int:
        """Returns the number of saves that finish stalling in `up_s` seconds without a failure."""
        if up_s <= 0:
            return 0
        mean_s = self.interval_s + sum(
            tier.stall_s / multiple
            for tier, multiple in zip(self.tiers, self.multiples, strict=True)
        )
        count = int(up_s / mean_s)
        while count > 0 and self.time_s(first, count) > up_s:
            count -= 1
        while self.time_s(first, count + 1) <= up_s:
            count += 1
        return count

    def work_s(self, first: int, up_s: float) -> float:
        """Returns the training time, excluding stalls, in `up_s` seconds after save `first`."""
        count = self.saves_within(first, up_s)
        rest_s = up_s - self.time_s(first, count)
        return count * self.interval_s + min(max(rest_s, 0.0), self.interval_s)

    def durable(self, first: int, up_s: float, known: Sequence[int]) -> list[int]:
        """Returns the newest save that each tier can load.

        Args:
            first: The save from which training resumed.
            up_s: Time since then.
            known: The newest save that each tier could load at that time.
        """
        newest = []
        for tier, multiple, before in zip(self.tiers, self.multiples, known, strict=True):
            written = first + self.saves_within(first, up_s - tier.write_s)
            save = written // multiple * multiple
            newest.append(save if save > first else before)
        return newest
