"""Finds late or lost ranks: ranks that suspect one report their position and read the others'.

They communicate through the store of the process group, which a healthy run does not access. The
store may be lost or stopped together with the first rank. A daemon thread therefore accesses it, so
that no rank has to wait for the store.
"""

import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import torch.distributed as dist

from paceline.core.units import format_seconds
from paceline.training.watch.stacks import LastCollective

_POLL_S = 0.1


class Presence(msgspec.Struct, frozen=True, kw_only=True):
    """Position of a rank, as reported by the rank."""

    rank: int
    step: int
    """Number of completed steps."""
    phase: str
    waited_s: float
    """Time spent in this phase so far."""
    collective: LastCollective | None = None

    def __str__(self) -> str:
        where = f"rank {self.rank} after step {self.step}, in {self.phase} for "
        where += format_seconds(self.waited_s)
        return where if self.collective is None else f"{where}, last {self.collective.text}"


class RollCall:
    """Collects the positions of all ranks.

    Args:
        number: Number of the run within this process; the same on all ranks.
    """

    def __init__(self, number: int) -> None:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._prefix = f"paceline/watch/{attempt}/{number}"
        self._store: Any = dist.distributed_c10d._get_default_store()

    def answers(self, own: Presence, patience_s: float) -> list[Presence | None]:
        """Publishes this rank's position; returns those of all ranks, None for silent ones.

        Args:
            own: Position of this rank.
            patience_s: Time for other ranks to notice the problem and answer.
        """
        found: list[Presence | None] = [None] * dist.get_world_size()
        found[own.rank] = own
        asking = threading.Thread(target=self._ask, args=(own, found, patience_s), daemon=True)
        asking.start()
        asking.join(patience_s + 1.0)
        return list(found)

    def _ask(self, own: Presence, found: list[Presence | None], patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        try:
            store = self._store.clone() if hasattr(self._store, "clone") else self._store
            store.set(f"{self._prefix}/{own.rank}", msgspec.json.encode(own))
            while None in found and time.monotonic() < deadline:
                for rank, answer in enumerate(found):
                    key = f"{self._prefix}/{rank}"
                    if answer is None and store.check([key]):
                        found[rank] = msgspec.json.decode(store.get(key), type=Presence)
                time.sleep(_POLL_S)
        except (RuntimeError, msgspec.DecodeError):
            return  # The store is gone: use the answers received so far.


def blame(answers: Sequence[Presence | None], patience_s: float) -> str:
    """Returns a description of the ranks that the others wait for.

    Args:
        answers: Positions by rank; None for silent ranks.
        patience_s: How long the answers were waited for.
    """
    present = [answer for answer in answers if answer is not None]
    silent = [str(rank) for rank, answer in enumerate(answers) if answer is None]
    if silent:
        ranks = f"rank{'s' * (len(silent) > 1)} {', '.join(silent)}"
        verb = "have" if len(silent) > 1 else "has"
        waiting = f"; {present[0]}" if present else ""
        return (
            f"{ranks} {verb} not answered within {format_seconds(patience_s)}: stopped, or gone"
            f"{waiting}"
        )
    behind = [each for each in present if _progress(each) < max(map(_progress, present))]
    if behind:
        ahead = max(present, key=_progress)
        return f"{'; '.join(map(str, behind))}; others wait for it: {ahead}"
    return f"all ranks answer and are at the same point ({present[0]}): suspect the link"


def _progress(presence: Presence) -> tuple[int, int]:
    return presence.step, 0 if presence.collective is None else presence.collective.number
