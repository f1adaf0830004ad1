"""Agreement between ranks when the set of trained parameters changes during training.

A collective cannot establish agreement: ranks without a change are about to send gradients, which
would be mistaken for the answer. Ranks use the group's store instead. A rank with a change posts it
in the store, and waits until all other ranks have posted theirs, up to the timeout of a collective.
A rank without a change does not access the store, so unchanged steps cost nothing. Its next
collective blocks on the ranks that have changed, and if it fails, the error reports their changes.
"""

import datetime
import warnings
import weakref
from collections.abc import MutableMapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from paceline.core.errors import UsageError
from paceline.parallel.ranks.pending import explain_failures
from paceline.parallel.reducer.same_model import DisagreementError, fingerprint
from paceline.parallel.reducer.settings import GroupReference

_PATIENCE = datetime.timedelta(seconds=20)
"""How long a rank waits for the others before it warns."""
_MOST_NAMED = 8
_REMEDY = "freeze, unfreeze and replace the same parameters on all ranks, before the same pass"

_num_made: MutableMapping[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class Changes:
    """Exchanges changes between a container's ranks; create instances in equal order on all ranks.

    Args:
        group_reference: The group of the ranks.
        device: The device that they compute on.
    """

    def __init__(self, group_reference: GroupReference, device: torch.device) -> None:
        self._group_reference = group_reference
        self._device = device
        group = group_reference.get()
        self._number = _num_made[group] = _num_made.get(group, 0) + 1
        self._num_agreed = 0
        explain_failures(self._explain_failure)

    def agree(self, change: str, lines: Sequence[str]) -> bool:
        """Waits until all ranks have posted a change; returns whether all models are now equal.

        Args:
            change: Description of the change on this rank.
            lines: Description of this rank's model, which must be equal on all ranks.
        """
        group = self._group_reference.get()
        store = _store_of(group)
        if store is None:
            return False
        num_ranks = dist.get_world_size(group)
        said = self._key(f"rank {dist.get_rank(group)}")
        alike = self._key(f"alike {fingerprint(lines)}")
        store.set(said, change)
        store.add(alike, 1)
        if store.add(self._key("arrived"), 1) == num_ranks:
            store.set(self._key("verdict"), str(store.add(alike, 0) == num_ranks))
        self._wait_for_verdict(store, change)
        is_same = bool(store.get(self._key("verdict")) == str(True).encode())
        store.delete_key(said)
        self._num_agreed += 1
        return is_same

    def _wait_for_verdict(self, store: dist.Store, change: str) -> None:
        group = self._group_reference.get()
        timeout: datetime.timedelta = group._get_backend(self._device).options._timeout
        patience = min(_PATIENCE, timeout / 2)
        if _appears(store, self._key("verdict"), patience):
            return
        text = f"rank {dist.get_rank()}: {change} here, but nothing has changed on"
        silent = [rank for rank, said in self._said(store) if not said]
        warnings.warn(f"{text} {_name(silent, group)} yet. To continue, {_REMEDY}", stacklevel=2)
        if not _appears(store, self._key("verdict"), timeout - patience):
            silent = [rank for rank, said in self._said(store) if not said]
            raise DisagreementError(
                f"{text} {_name(silent, group)} for {timeout.total_seconds():.0f} s; {_REMEDY}"
            )

    def _said(self, store: dist.Store) -> list[tuple[int, str]]:
        """Returns each rank of the group with its posted change, empty if it has posted none."""
        keys = [self._key(f"rank {rank}") for rank in range(self._group_reference.get().size())]
        return [
            (rank, store.get(key).decode() if store.check([key]) else "")
            for rank, key in enumerate(keys)
        ]

    def _explain_failure(self) -> str | None:
        """Returns the changes of other ranks if this rank has posted none, otherwise None."""
        try:
            group = self._group_reference.get()
            store = _store_of(group)
            if store is None or not store.check([self._key("arrived")]):
                return None
            told = dict(said for said in self._said(store) if said[1])
            if not told or dist.get_rank(group) in told:
                return None
            first = min(told)
            return (
                f"on {_name(list(told), group)}, {told[first]}, and nothing has changed here: "
                f"{_REMEDY}"
            )
        except (RuntimeError, UsageError):  # The store or the group is gone.
            return None

    def _key(self, name: str) -> str:
        return f"paceline/container {self._number}/change {self._num_agreed}/{name}"


def describe_change(
    names: Sequence[str],
    before: Sequence[tuple[nn.Parameter, bool]],
    after: Sequence[tuple[nn.Parameter, bool]],
) -> str:
    """Returns a description of the first change.

    Args:
        names: The current names of the parameters.
        before: The previous parameters, and whether each was trained.
        after: The current parameters, and whether each is trained.
    """
    for name, (known, was_trained), (parameter, is_trained) in zip(
        names, before, after, strict=False
    ):
        if parameter is not known:
            return f"parameter {name!r} was replaced"
        if is_trained != was_trained:
            return f"parameter {name!r} was {'unfrozen' if is_trained else 'frozen'}"
    return f"there are {len(after)} parameters, and there were {len(before)}"


def _store_of(group: dist.ProcessGroup) -> dist.Store | None:
    """Returns the store of the group's rendezvous; None if the group has none."""
    backend, store = dist.distributed_c10d._world.pg_map.get(group, ("", None))
    return None if backend == "fake" else store


def _appears(store: dist.Store, key: str, within: datetime.timedelta) -> bool:
    try:
        store.wait([key], within)
    except RuntimeError as error:  # Each kind of store has its own timeout error.
        if "timeout" not in str(error).lower():
            raise
        return False
    return True


def _name(ranks: Sequence[int], group: dist.ProcessGroup) -> str:
    first = ", ".join(str(dist.get_global_rank(group, rank)) for rank in ranks[:_MOST_NAMED])
    others = f" and {len(ranks) - _MOST_NAMED} others" if len(ranks) > _MOST_NAMED else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {first}{others}"
