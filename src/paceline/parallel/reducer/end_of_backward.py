"""Joint completion of a backward pass for all containers that take part in it.

Ranks may reach two containers in different orders. If each container sent and waited separately,
two ranks could deadlock, each waiting in a different container. Therefore all containers send first
and then all wait, in creation order, which is the same on all ranks.
"""

import itertools
import weakref
from typing import Protocol

from torch.autograd import Variable


class Participant(Protocol):
    """An object with messages to send and to wait for when a backward pass is over."""

    made: int
    """The value of `next_number` at creation."""
    rank: int
    """The rank it belongs to: ranks may be threads of one process."""

    def send_rest(self) -> None:
        """Sends the messages not sent during backward."""

    def receive_rest(self) -> None:
        """Waits for all messages in flight."""


_numbers = itertools.count()
_participants: dict[int, list["weakref.ref[Participant]"]] = {}
"""Participants of each pass, by the autograd engine's ID of the pass."""
_awaiting: "weakref.WeakSet[Participant]" = weakref.WeakSet()


def next_number() -> int:
    """Returns a creation number; equal on all ranks that create the same participants."""
    return next(_numbers)


def take_part(participant: Participant, task: int) -> None:
    """Registers a participant to be called at the end of the current pass.

    Args:
        participant: The participant; not kept alive.
        task: The autograd engine's ID of the pass.
    """
    if task not in _participants:
        _participants[task] = []
        Variable._execution_engine.queue_callback(lambda: _finish(task))
    _participants[task].append(weakref.ref(participant))


def leave(participant: Participant, task: int) -> None:
    """Forgets a pass that an error aborted.

    Args:
        participant: A participant of the pass.
        task: The autograd engine's ID of the pass.
    """
    _participants.pop(task, None)
    _awaiting.discard(participant)


def expect_backward(participant: Participant) -> None:
    """Records that a forward pass has run whose backward is to be averaged."""
    _awaiting.add(participant)


def is_alone(participant: Participant) -> bool:
    """Returns whether this is the only participant of its rank with a pending backward.

    Only then may it wait during backward: ranks that reach two containers in different orders would
    otherwise each wait for a message that the other sends later.
    """
    return all(other is participant or other.rank != participant.rank for other in list(_awaiting))


def _finish(task: int) -> None:
    alive = [participant() for participant in _participants.pop(task)]
    ordered = sorted((one for one in alive if one is not None), key=lambda one: one.made)
    for participant in ordered:
        participant.send_rest()
    for participant in ordered:
        participant.receive_rest()
    # Others, such as a container whose forward was aborted, are no longer expected.
    ranks = {participant.rank for participant in ordered}
    for other in list(_awaiting):
        if other.rank in ranks:
            _awaiting.discard(other)
