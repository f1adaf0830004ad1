"""When a run saves to which tier, and what could be loaded after a failure.

Saves are counted from the beginning of the run: every one goes to the first tier, every m-th to the
second, and so on. Positions are computed, not stepped through: a run of 60 days that saves every
minute costs no more than its failures.
"""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tier:
    """A place that checkpoints are saved to."""

    name: str
    """memory, disk or s3."""
    stall_s: float
    """How long a save stops training."""
    write_s: float
    """From the end of the stall until the save could be loaded."""
    load_s: float
    """Time to load it, all devices at once."""
    is_volatile: bool = False
    """Whether a failure of neighbouring hosts loses it: a copy in a peer's memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cadence:
    """Saves after every interval of training; tier i has every multiple[i]-th of them."""

    interval_s: float
    tiers: tuple[Tier, ...]
    multiples: tuple[int, ...]

    def time_s(self, first: int, count: int) -> float:
        """Returns how long `count` intervals with their saves take after save number `first`."""
        stalls = sum(
            tier.stall_s * ((first + count) // multiple - first // multiple)
            for tier, multiple in zip(self.tiers, self.multiples, strict=True)
        )
        return count * self.interval_s + stalls

    def saves_within(self, first: int, up_s: float) -> int:
        """Returns how many saves have ended after so much time without a failure."""
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
        """Returns how much of the time after save number `first` was training, not saving."""
        count = self.saves_within(first, up_s)
        rest_s = up_s - self.time_s(first, count)
        return count * self.interval_s + min(max(rest_s, 0.0), self.interval_s)

    def durable(self, first: int, up_s: float, known: Sequence[int]) -> list[int]:
        """Returns the newest save that each tier could load.

        Args:
            first: The save that training went on from.
            up_s: Time since then.
            known: What the tiers could load then.
        """
        newest = []
        for tier, multiple, before in zip(self.tiers, self.multiples, known, strict=True):
            written = first + self.saves_within(first, up_s - tier.write_s)
            save = written // multiple * multiple
            newest.append(save if save > first else before)
        return newest
