"""Which fragment of the parameters is sent and applied after which step, and what is in it.

The fragments are sent evenly spread over a round of `every_steps` steps, the last at its end. Each
is applied `delay_steps` after it was sent, before the next is sent. All sites count the same steps,
so all agree without a message.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Sequence

from paceline.core.errors import UsageError
from paceline.core.outer import OuterSettings


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The exchanges of a run."""

    settings: OuterSettings

    def sent(self, step: int) -> int | None:
        """Returns the fragment that is sent after a step, which is counted from 1, or None."""
        every, number = self.settings.every_steps, self.settings.fragments
        place = (step - 1) % every + 1
        # Fragment f ends at place (f + 1) * every // number.
        fragment = -(-place * number // every) - 1
        return fragment if (fragment + 1) * every // number == place else None

    def applied(self, step: int) -> int | None:
        """Returns the fragment whose average is applied after a step, or None."""
        before = step - self.settings.delay_steps
        return self.sent(before) if before > 0 else None


def divide(sizes: Sequence[int], num_parts: int) -> list[range]:
    """Divides a row of items into parts of neighbours, so that the largest part is smallest."""
    if len(sizes) < num_parts:
        raise UsageError(
            f"fragments {num_parts} are more than the {len(sizes)} trained parameters; take fewer"
        )
    least, most = max(sizes), sum(sizes)
    cap = least + bisect.bisect_left(
        range(least, most), True, key=lambda cap: len(_filled(sizes, cap, 1)) <= num_parts
    )
    return _filled(sizes, cap, num_parts)


def _filled(sizes: Sequence[int], cap: int, num_parts: int) -> list[range]:
    """Returns parts of at most `cap`, at least `num_parts` of them."""
    begins, size = [0], 0
    for index, own in enumerate(sizes):
        # The items that are left suffice for one in each missing part.
        is_last_chance = len(sizes) - index <= num_parts - len(begins)
        if index and (size + own > cap or is_last_chance):
            begins.append(index)
            size = 0
        size += own
    return [range(*ends) for ends in itertools.pairwise([*begins, len(sizes)])]
