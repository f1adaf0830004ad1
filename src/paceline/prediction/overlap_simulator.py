"""Computing and communicating side by side, each slowing the other, simulated from event to event.

Work is done piece by piece, messages go one after the other. A message may start when a piece of
work is over; a piece may have to wait for messages. While a message is under way beside work, it
takes `slowdown` times as long as alone, and work loses the share `lost_share` of its pace; where
one of the two has nothing to do, the other goes at its own pace.
"""

import dataclasses
import math
from collections.abc import Sequence

from paceline.prediction.calibration import Contention


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputeSegment:
    """A piece of computing."""

    seconds: float
    """Alone."""
    needs: int = 0
    """How many messages must have arrived before it starts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
    """A message."""

    seconds: float
    """Alone."""
    num_bytes: int
    after: int
    """How many pieces of work must be over before it starts."""
    contention: Contention

    @property
    def lost_share(self) -> float:
        """What work loses of its pace while this goes beside it.

        In all no more than if it had waited for the message instead.
        """
        beside_s = self.seconds * self.contention.slowdown
        return min(self.contention.lost_s_per_byte * self.num_bytes, self.seconds) / beside_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverlapResult:
    """How both lanes ended."""

    lost_s: float
    """What work lost to messages beside it."""
    waited_s: float
    """When work waited for messages, and the program for the last of them."""


def simulate_overlap(
    work: Sequence[ComputeSegment], transfers: Sequence[Transfer], *, wait_for_all: bool
) -> OverlapResult:
    """Plays both lanes until work is over and, with `wait_for_all`, all messages have arrived."""
    num_done = num_arrived = 0
    work_left = [piece.seconds for piece in work]
    send_left = [transfer.seconds for transfer in transfers]
    lost_s = waited_s = 0.0
    while num_done < len(work) or (wait_for_all and num_arrived < len(transfers)):
        works = num_done < len(work) and num_arrived >= work[num_done].needs
        sends = num_arrived < len(transfers) and num_done >= transfers[num_arrived].after
        if not works and not sends:
            raise ValueError(f"work {num_done} waits for a message that waits for it")
        work_pace = send_pace = 1.0
        if works and sends:
            work_pace = 1 - transfers[num_arrived].lost_share
            send_pace = 1 / transfers[num_arrived].contention.slowdown
        work_s = _until_end(work_left[num_done], work_pace) if works else math.inf
        send_s = _until_end(send_left[num_arrived], send_pace) if sends else math.inf
        elapsed_s = min(work_s, send_s)
        if works:
            lost_s += elapsed_s * (1 - work_pace)
            work_left[num_done] -= elapsed_s * work_pace
        else:
            waited_s += elapsed_s
        if sends:
            send_left[num_arrived] -= elapsed_s * send_pace
        num_done += work_s == elapsed_s
        num_arrived += send_s == elapsed_s
    return OverlapResult(lost_s=lost_s, waited_s=waited_s)


def _until_end(left_s: float, pace: float) -> float:
    return left_s / pace if pace > 0 else math.inf
