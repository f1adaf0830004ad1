"""Ending a backward pass for all containers that take part in it, together.

Ranks may reach two containers in different orders. Were each to send and to wait for itself, two
ranks would wait for each other's other container. So all send first, and all wait then, in the
order in which they were made, which is the same on all ranks.
"""

import itertools
import weakref
from typing import Protocol

from torch.autograd import Variable


class Participant(Protocol):
    """Somebody who has messages to send and to wait for when a backward pass is over."""

    made: int
    """What `next_number` returned when it was made."""
    rank: int
    """Whose it is: ranks may be threads of one process."""

    def send_rest(self) -> None:
        """Sends what backward has not sent."""

    def receive_rest(self) -> None:
        """Waits for all that was sent."""


_numbers = itertools.count()
_participants: dict[int, list["weakref.ref[Participant]"]] = {}
"""Who takes part in a pass, by the autograd engine's number for it."""
_awaiting: "weakref.WeakSet[Participant]" = weakref.WeakSet()


def next_number() -> int:
    """Returns how many participants were made before; the same on all ranks that make the same."""
    return next(_numbers)


def take_part(participant: Participant, task: int) -> None:
    """Has a participant called at the end of the pass that is going on.

    Args:
        participant: Who; not kept alive.
        task: The autograd engine's number for the pass.
    """
    if task not in _participants:
        _participants[task] = []
        Variable._execution_engine.queue_callback(lambda: _finish(task))
    _participants[task].append(weakref.ref(participant))


def leave(participant: Participant, task: int) -> None:
    """Forgets a pass that an error has ended.

    Args:
        participant: Who took part.
        task: The autograd engine's number for the pass.
    """
    _participants.pop(task, None)
    _awaiting.discard(participant)


def expect_backward(participant: Participant) -> None:
    """Notes that a forward pass has run whose backward is to be averaged."""
    _awaiting.add(participant)


def is_alone(participant: Participant) -> bool:
    """Whether nobody else's backward is expected, so that waiting in backward blocks no other.

    Ranks that reach two containers in different orders would each wait for what the other one
    sends later.
    """
    return all(other is participant or other.rank != participant.rank for other in list(_awaiting))


def _finish(task: int) -> None:
    alive = [participant() for participant in _participants.pop(task)]
    ordered = sorted((one for one in alive if one is not None), key=lambda one: one.made)
    for participant in ordered:
        participant.send_rest()
    for participant in ordered:
        participant.receive_rest()
    # Whoever took no part, such as a container whose forward broke off, is not waited for any more.
    ranks = {participant.rank for participant in ordered}
    for other in list(_awaiting):
        if other.rank in ranks:
            _awaiting.discard(other)
