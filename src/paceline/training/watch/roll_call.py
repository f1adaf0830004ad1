"""Who is late or gone: ranks that suspect it say where they are, and read what the others say.

They meet in the store of the process group, which nobody talks to while a run is well. The store
may be gone with the first rank, or stopped with it; so it is asked from a thread that nobody has to
wait for.
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
    """What a rank says of itself."""

    rank: int
    step: int
    """Steps that it has done."""
    phase: str
    waited_s: float
    """How long it has been in this phase."""
    collective: LastCollective | None = None

    def __str__(self) -> str:
        where = f"rank {self.rank} after step {self.step}, in {self.phase} for "
        where += format_seconds(self.waited_s)
        return where if self.collective is None else f"{where}, last {self.collective.text}"


class RollCall:
    """Asks all ranks where they are.

    Args:
        number: Which run of this process it is for; the same on all ranks.
    """

    def __init__(self, number: int) -> None:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._prefix = f"paceline/watch/{attempt}/{number}"
        self._store: Any = dist.distributed_c10d._get_default_store()

    def answers(self, own: Presence, patience_s: float) -> list[Presence | None]:
        """Says where this rank is, and returns what all ranks say; None for who says nothing.

        Args:
            own: This rank.
            patience_s: How long others may take to notice that something is wrong, too.
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
            return  # The store is gone: what was heard until then is all there is.


def blame(answers: Sequence[Presence | None], patience_s: float) -> str:
    """Returns which ranks the others wait for.

    Args:
        answers: By rank; None for who has said nothing.
        patience_s: How long they were waited for.
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
