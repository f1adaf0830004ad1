"""Checks that all ranks hold the same model before they train it together.

`require_same_model` compares one fingerprint per rank in one collective, and locates the difference
only if fingerprints differ. Without the check, ranks whose models differ in a shape would deadlock
or sum gradients of different parameters. `broadcast_tensors` copies the first rank's values to all
ranks. The traffic per rank of both is independent of the number of ranks.

Agreement between ranks when the set of trained parameters changes during training.

A collective cannot establish agreement: ranks without a change are about to send gradients, which
would be mistaken for the answer. Ranks use the group's store instead. A rank with a change posts it
in the store, and waits until all other ranks have posted theirs, up to the timeout of a collective.
A rank without a change does not access the store, so unchanged steps cost nothing. Its next
collective blocks on the ranks that have changed, and if it fails, the error reports their changes.
"""

import dataclasses
import datetime
import hashlib
import warnings
import weakref
from collections.abc import Iterable, MutableMapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from paceline.core.errors import PacelineError, UsageError
from paceline.parallel.buckets import plan_buckets, tensor_spec, view_like
from paceline.parallel.ranks.collectives import GroupReference
from paceline.parallel.ranks.pending import explain_failures

_BROADCAST_BYTES = 256 * 2**20


class DisagreementError(PacelineError):
    """Ranks hold different models; the message names the first difference."""


def require_same_model(
    module: nn.Module, settings: str, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Raises on every rank unless all ranks have the same tensors and settings.

    `settings` describes all else that must be equal, such as the bucket size.
    """
    found = first_difference(describe_model(module, settings), group, device)
    if found is not None:
        raise DisagreementError(
            f"the ranks' models differ: rank {found.reference} has {found.expected}, where rank "
            f"{found.culprit} has {found.found}; build the same model on every rank"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """The first line in which ranks differ, and two ranks that have different ones."""

    reference: int
    expected: str
    culprit: int
    found: str


def first_difference(
    own: list[str], group: dist.ProcessGroup, device: torch.device
) -> Difference | None:
    """Returns where the ranks' lines differ first, the same on all ranks; None if they do not."""
    number = fingerprint(own)
    extremes = torch.tensor([number, -number], dtype=torch.int64, device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    largest, negated_smallest = extremes.tolist()
    if largest == -negated_smallest:
        return None
    return _locate_difference(own, group, device)


def describe_model(module: nn.Module, settings: str) -> list[str]:
    """Returns one line for each property that must be equal on all ranks."""
    return [
        *(f"parameter {_describe(*named)}" for named in module.named_parameters()),
        *(f"buffer {_describe(*named)}" for named in module.named_buffers()),
        f"settings {settings}",
    ]


def fingerprint(lines: Sequence[str]) -> int:
    """Returns a 56-bit hash of lines."""
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    return int.from_bytes(digest[:7], "big")


def _describe(name: str, tensor: Tensor) -> str:
    # Strides matter because a bucket's buffer holds a tensor's elements in memory order.
    return (
        f"{name!r} of shape {tuple(tensor.shape)}, strides {tensor.stride()}, {tensor.dtype}, "
        f"{'trained' if tensor.requires_grad else 'frozen'}"
    )


def _locate_difference(
    own: list[str], group: dist.ProcessGroup, device: torch.device
) -> Difference:
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    reference = _broadcast_lines(own if rank == 0 else [], 0, group, device)
    pairs = zip(own, reference, strict=False)
    shorter = min(len(own), len(reference))
    first = next((index for index, (mine, theirs) in enumerate(pairs) if mine != theirs), shorter)
    # Encodes line and rank in one number, ordered by line first.
    encoded = torch.iinfo(torch.int64).max if own == reference else first * world_size + rank
    least = torch.tensor([encoded], dtype=torch.int64, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    index, culprit = divmod(int(least), world_size)
    culprits = _broadcast_lines(
        own[index : index + 1] if rank == culprit else [], culprit, group, device
    )
    return Difference(
        reference=dist.get_global_rank(group, 0),
        expected=reference[index] if index < len(reference) else "nothing",
        culprit=dist.get_global_rank(group, culprit),
        found=culprits[0] if culprits else "nothing",
    )


def _broadcast_lines(
    lines: Sequence[str], source: int, group: dist.ProcessGroup, device: torch.device
) -> list[str]:
    content: list[list[str]] = [list(lines)]
    dist.broadcast_object_list(content, group=group, device=device, group_src=source)
    return content[0]


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Overwrites tensors with the values of the group's first rank, in few collectives."""
    chosen = list(tensors)
    for plan in plan_buckets([tensor_spec(tensor) for tensor in chosen], _BROADCAST_BYTES):
        flat = torch.empty(plan.num_elements, dtype=plan.dtype, device=plan.device)
        views = [view_like(chosen[slot.tensor], slot.piece_of(flat)) for slot in plan.slots]
        for slot, view in zip(plan.slots, views, strict=True):
            view.copy_(chosen[slot.tensor])
        # Sends bytes, so that the backend need not support the dtype.
        dist.broadcast(flat.view(torch.uint8), group=group, group_src=0)
        targets = [chosen[slot.tensor] for slot in plan.slots]
        # Two forward passes may precede one backward. A graph that has saved a buffer does not use
        # its old value in training, so autograd must not see the buffer as modified.
        with _unsafe_preserve_version_counter(tuple(targets)):
            for target, view in zip(targets, views, strict=True):
                target.copy_(view)


_PATIENCE = datetime.timedelta(seconds=20)
"""How long a rank waits for the others before it warns."""
_MOST_NAMED = 8
_REMEDY = "freeze, unfreeze and replace the same parameters on all ranks, before the same pass"

_num_made: MutableMapping[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class Changes:
    """Exchanges changes between a container's ranks; create them in equal order on all ranks."""

    def __init__(self, group_reference: GroupReference, device: torch.device) -> None:
        self._group_reference = group_reference
        self._device = device
        group = group_reference.get()
        self._number = _num_made[group] = _num_made.get(group, 0) + 1
        self._num_agreed = 0
        explain_failures(self._explain_failure)

    def agree(self, change: str, lines: Sequence[str]) -> bool:
        """Waits until all ranks have posted a change; returns whether all models are now equal."""
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

    Each parameter comes with whether it is trained.
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
