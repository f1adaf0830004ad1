"""Reduce-scatter and all-gather, as each backend does them cheapest.

A flat tensor is cut into one shard per rank. `start_reduce_scatter` adds up every rank's tensor and
leaves each rank the sum of its own shard; `start_all_gather` gives all ranks every rank's shard.
Either moves (n - 1)/n of the tensor into and out of each of n ranks, half of what an all-reduce
moves, if both directions of a link are in use at the same time.

NCCL has each as one call that works in place. gloo has none that does: its reduce-scatter is an
all-reduce inside, its all-to-all and its broadcasts use one direction of a link at a time. Here
every rank sends each other one its shard, and receives theirs, point to point; a rank adds up
what it gets. At 1 Gbit/s, 33 MB are reduced in 154 ms between two hosts and 260 between four, and
gathered in 142 and 251, where an all-reduce takes 281 and 436, gloo's all-to-all 283 and 392, its
all-gather 232 and 274 (results/sharding-exchange.jsonl). So many messages are only for a small
number of ranks: beyond it, their number would cost more than the link.
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.parallel.ranks.collectives import all_gather_single, reduce_scatter_single
from paceline.parallel.ranks.pending import Pending

_MOST_PEERS = 16
"""Up to so many ranks send to each other directly."""

# Each kind is matched in its own order, whatever else is sent between two ranks.
_REDUCE_SCATTER_TAG = 40_001
_ALL_GATHER_TAG = 40_002


class ReduceScatter(Pending):
    """A sum of every rank's message, of which each rank gets its own shard.

    Args:
        message: What is sent; it must stay as it is until then.
        summands: What arrives: every rank's part of this rank's shard, or the sum alone.
        works: What to wait for.
        direct: As for `Pending`.
    """

    def __init__(
        self,
        message: Tensor,
        summands: Sequence[Tensor],
        works: Sequence[dist.Work | None],
        *,
        direct: bool = False,
    ) -> None:
        super().__init__("reduce-scatter", message.nbytes, works, message.device, direct=direct)
        self._message = message
        self._summands = summands

    def add_to(self, target: Tensor, *, overwrite: bool) -> None:
        """Adds this rank's shard of the sum to a tensor, or replaces what is in it.

        Summands are added up in the wider dtype of theirs and the target's. Their memory is used.
        """
        first, *others = self._summands
        if first.dtype.itemsize > target.dtype.itemsize:
            for summand in others:
                first.add_(summand)
            others = []
        if not overwrite:
            target.add_(first)
        elif others and first.dtype == target.dtype:
            torch.add(first, others.pop(0), out=target)
        else:
            target.copy_(first)
        for summand in others:
            target.add_(summand)


def works_in_place(device: torch.device) -> bool:
    """Whether the device's backend has both collectives as one call each, in place."""
    return device.type == "cuda"


def sends_directly(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether ranks send to each other, so that both collectives may mix in any order."""
    return not works_in_place(device) and dist.get_world_size(group) <= _MOST_PEERS


def start_reduce_scatter(message: Tensor, group: dist.ProcessGroup) -> ReduceScatter:
    """Starts to add up equally long flat messages; their length is a multiple of the ranks."""
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    rows = message.view(num_ranks, message.numel() // num_ranks)
    if num_ranks == 1:
        return ReduceScatter(message, [rows[0]], [])
    if works_in_place(message.device):
        work = reduce_scatter_single(rows[rank], message, group=group, async_op=True)
        return ReduceScatter(message, [rows[rank]], [work])
    if not sends_directly(group, message.device):
        summands = torch.empty_like(rows)
        work = dist.all_to_all_single(summands, rows, group=group, async_op=True)
        return ReduceScatter(message, summands.unbind(), [work])
    received = torch.empty_like(rows[1:])
    peers = _peers(rank, num_ranks)
    works = _swap(
        {peer: rows[peer] for peer in peers},
        dict(zip(peers, received, strict=True)),
        group,
        _REDUCE_SCATTER_TAG,
    )
    return ReduceScatter(message, [rows[rank], *received], works, direct=True)


def start_all_gather(flat: Tensor, borders: Sequence[int], group: dist.ProcessGroup) -> Pending:
    """Starts to give all ranks every rank's shard of a flat tensor, in place.

    Args:
        flat: On each rank, its own shard holds the values to send.
        borders: Where shards begin, in the order of ranks, and where the last one ends.
        group: The ranks.
    """
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    name = "all-gather"
    if num_ranks == 1 or not flat.numel():
        return Pending(name, flat.nbytes, [], flat.device)
    if not sends_directly(group, flat.device):
        works = _gather_by_collectives(flat, borders, group)
        return Pending(name, flat.nbytes, works, flat.device)
    shards = _cut(flat, borders)
    peers = _peers(rank, num_ranks)
    # Parameters may be in flight when a profiler stops, and a message that it has seen begin would
    # end in memory that it has freed.
    with _unseen_by_profilers():
        works = _swap(
            dict.fromkeys(peers, shards[rank]),
            {peer: shards[peer] for peer in peers},
            group,
            _ALL_GATHER_TAG,
        )
    return Pending(name, flat.nbytes, works, flat.device, direct=True)


def _cut(flat: Tensor, borders: Sequence[int]) -> list[Tensor]:
    return [flat[begin:end] for begin, end in itertools.pairwise(borders)]


def _gather_by_collectives(
    flat: Tensor, borders: Sequence[int], group: dist.ProcessGroup
) -> list[dist.Work | None]:
    rank = dist.get_rank(group)
    own = flat[borders[rank] : borders[rank + 1]]
    # Equal shards are not looked at one by one: there may be thousands.
    if isinstance(borders, range):
        return [all_gather_single(flat, own, group=group, async_op=True)]
    shards = _cut(flat, borders)
    if works_in_place(flat.device):
        return [dist.all_gather(shards, own, group=group, async_op=True)]
    # gloo gathers equal shards only.
    return [
        dist.broadcast(shard, group=group, group_src=source, async_op=True)
        for source, shard in enumerate(shards)
        if shard.numel()
    ]


def _peers(rank: int, num_ranks: int) -> list[int]:
    """Returns the other ranks, beginning with the next, so that not all send to the same first."""
    return [(rank + distance) % num_ranks for distance in range(1, num_ranks)]


def _swap(
    sent: dict[int, Tensor], received: dict[int, Tensor], group: dist.ProcessGroup, tag: int
) -> list[dist.Work | None]:
    """Starts to receive from and to send to ranks; what is empty is left out on both sides."""
    receipts = [
        dist.irecv(tensor, group=group, group_src=peer, tag=tag)
        for peer, tensor in received.items()
        if tensor.numel()
    ]
    return receipts + [
        dist.isend(tensor, group=group, group_dst=peer, tag=tag)
        for peer, tensor in sent.items()
        if tensor.numel()
    ]


@contextlib.contextmanager
def _unseen_by_profilers() -> Iterator[None]:
    if not torch.autograd.profiler._is_profiler_enabled:
        yield
        return
    torch._C._autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch._C._autograd._enable_record_function(True)
