"""Process groups and collectives, in the cheapest way for each backend.

A flat tensor is divided into one shard per rank. `start_reduce_scatter` sums all ranks' tensors and
leaves each rank the sum of its own shard. `start_all_gather` gives all ranks every rank's shard.
Each moves (n - 1)/n of the tensor into and out of each of n ranks, half the traffic of an
all-reduce, if both directions of a link are in use at the same time.

NCCL implements each as one in-place call. gloo has no efficient equivalent: its reduce-scatter is
internally an all-reduce, and its all-to-all and broadcasts use one direction of a link at a time.
With gloo, every rank therefore exchanges shards with every other rank point to point, and sums the
shards that it receives. At 1 Gbit/s, a reduce-scatter of 33 MB takes 154 ms between two hosts and
260 between four, and an all-gather 142 and 251, where an all-reduce takes 281 and 436, gloo's
all-to-all 283 and 392, its all-gather 232 and 274 (results/sharding-exchange.jsonl). Direct
exchange is limited to few ranks: beyond that, the number of messages would cost more than the link.

`from_first`, `from_all` and `require_all` let ranks agree on results and errors before any of them
acts.
"""

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from paceline.core.errors import UsageError
from paceline.devices import accelerator
from paceline.parallel.ranks.pending import Pending


def resolve_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    """Returns the process group itself, that of a one-dimensional mesh, or the default group."""
    if not dist.is_initialized():
        raise UsageError("there is no process group yet; create this inside distributed_session()")
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise UsageError(
            "this rank is not in the process group; create this only on ranks of the group"
        )
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise UsageError(f"a mesh of one dimension is needed, this one has {group.ndim}")
        return group.get_group()
    if group is None:
        group = dist.group.WORLD
    assert group is not None
    return group


def host_side_device(group: dist.ProcessGroup) -> torch.device:
    """Returns the device for messages about values of the host: the CPU, if a group sends from it.

    NCCL sends from GPUs only.
    """
    cpu = torch.device("cpu")
    types = group._device_types
    return cpu if cpu in types else accelerator.selected_device(types)


class GroupReference:
    """A weak reference to a process group.

    Objects that outlive the destruction of a group must not keep it alive: its threads would then
    end with the interpreter, which sometimes aborts the process.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._reference = weakref.ref(group)

    def get(self) -> dist.ProcessGroup:
        """Returns the group; raises if it has been destroyed."""
        group = self._reference()
        if group is None:
            raise UsageError(
                "the process group has been destroyed; create the containers that use it again"
            )
        return group


# torch 2.13 renames the collectives over one tensor and deprecates the old names; earlier versions
# have only the old names.
all_gather_single: Callable[..., Any] = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)
reduce_scatter_single: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)


def reduce_numbers(
    numbers: Sequence[float],
    operation: dist.ReduceOp.RedOpType,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> list[float]:
    """Returns each number reduced over the ranks (sum, maximum or minimum), equal on all ranks."""
    tensor = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, operation, group=group)
    result: list[float] = tensor.tolist()
    return result


def mean_over_ranks(numbers: Sequence[float], device: torch.device) -> list[float]:
    """Returns each number's mean over all ranks, equal on all ranks."""
    totals = reduce_numbers(numbers, dist.ReduceOp.SUM, device)
    return [total / dist.get_world_size() for total in totals]


_MOST_PEERS = 16
"""Up to this many ranks exchange messages directly."""


# Separate tags, so that each kind is matched in its own order, independent of other messages.
_REDUCE_SCATTER_TAG = 40_001


_ALL_GATHER_TAG = 40_002


_ALL_TO_ALL_TAG = 40_003


class ReduceScatter(Pending):
    """A reduce-scatter in flight.

    The message must not change until it has been sent. The summands are every rank's summand of
    this rank's shard, or just the sum.
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
        """Adds this rank's shard of the sum to a tensor, or overwrites the tensor with it.

        Summands are added in the wider of their dtype and the target's. The memory of the summands
        may be overwritten.
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
    """Returns whether the device's backend has both collectives as in-place calls."""
    return device.type != "cpu"


def sends_directly(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Returns whether ranks exchange messages directly; the two collectives may then interleave."""
    return not works_in_place(device) and group.size() <= _MOST_PEERS


def start_reduce_scatter(message: Tensor, group: dist.ProcessGroup) -> ReduceScatter:
    """Starts a reduce-scatter of flat messages; their length must be a multiple of the ranks."""
    num_ranks, rank = group.size(), group.rank()
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
    received = torch.empty_like(rows[1:]).unbind()
    peers = _peers(rank, num_ranks)
    of_ranks = rows.unbind()
    works = _swap(
        {peer: of_ranks[peer] for peer in peers},
        dict(zip(peers, received, strict=True)),
        group,
        _REDUCE_SCATTER_TAG,
    )
    return ReduceScatter(message, [of_ranks[rank], *received], works, direct=True)


def start_all_to_all(rows: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Pending]:
    """Starts an all-to-all, in which row r goes to rank r; returns the rows by source, in flight.

    The rows must not change until they have been sent.
    """
    name = "all-to-all"
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    received = torch.empty_like(rows)
    if not sends_directly(group, rows.device):
        work = dist.all_to_all_single(received, rows, group=group, async_op=True)
        return received, Pending(name, rows.nbytes, [work], rows.device)
    received[rank].copy_(rows[rank])
    peers = _peers(rank, num_ranks)
    works = _swap(
        {peer: rows[peer] for peer in peers},
        {peer: received[peer] for peer in peers},
        group,
        _ALL_TO_ALL_TAG,
    )
    return received, Pending(name, rows.nbytes, works, rows.device, direct=True)


def start_all_gather(flat: Tensor, borders: Sequence[int], group: dist.ProcessGroup) -> Pending:
    """Starts an in-place all-gather of the shards of a flat tensor.

    On each rank, its own shard holds the values to send. `borders` are the start of each rank's
    shard, followed by the end of the last one.
    """
    num_ranks, rank = group.size(), group.rank()
    name = "all-gather"
    if num_ranks == 1 or not flat.numel():
        return Pending(name, flat.nbytes, [], flat.device)
    if not sends_directly(group, flat.device):
        works = _gather_by_collectives(flat, borders, group)
        return Pending(name, flat.nbytes, works, flat.device)
    shards = _cut(flat, borders)
    peers = _peers(rank, num_ranks)
    # Parameters may be in flight when a profiler stops. A message whose start it has recorded would
    # record its end in memory that the profiler has freed.
    with _unseen_by_profilers():
        works = _swap(
            dict.fromkeys(peers, shards[rank]),
            {peer: shards[peer] for peer in peers},
            group,
            _ALL_GATHER_TAG,
        )
    return Pending(name, flat.nbytes, works, flat.device, direct=True)


def _cut(flat: Tensor, borders: Sequence[int]) -> list[Tensor]:
    sizes = [end - begin for begin, end in itertools.pairwise(borders)]
    return list(flat.split_with_sizes(sizes))


def _gather_by_collectives(
    flat: Tensor, borders: Sequence[int], group: dist.ProcessGroup
) -> list[dist.Work | None]:
    rank = group.rank()
    own = flat[borders[rank] : borders[rank + 1]]
    # A range means equal shards, which need not be sliced: there may be thousands.
    if isinstance(borders, range):
        return [all_gather_single(flat, own, group=group, async_op=True)]
    shards = _cut(flat, borders)
    if works_in_place(flat.device):
        return [dist.all_gather(shards, own, group=group, async_op=True)]
    # gloo's all-gather supports only equal shards.
    return [
        dist.broadcast(shard, group=group, group_src=source, async_op=True)
        for source, shard in enumerate(shards)
        if shard.numel()
    ]


def _peers(rank: int, num_ranks: int) -> list[int]:
    """Returns the other ranks, beginning with the next, so that ranks start with distinct peers."""
    return [(rank + distance) % num_ranks for distance in range(1, num_ranks)]


def _swap(
    sent: dict[int, Tensor], received: dict[int, Tensor], group: dist.ProcessGroup, tag: int
) -> list[dist.Work | None]:
    """Starts receives from and sends to other ranks; both sides skip empty tensors."""
    # The group's own methods, because torch's functions check what is known here: they cost more
    # of a small layer's time than the message itself.
    works: list[dist.Work | None] = [
        group.recv([tensor], peer, tag) for peer, tensor in received.items() if tensor.numel()
    ]
    works += [group.send([tensor], peer, tag) for peer, tensor in sent.items() if tensor.numel()]
    return works


def _unseen_by_profilers() -> contextlib.AbstractContextManager[None]:
    if torch.autograd.profiler._is_profiler_enabled:
        return _without_recorded_functions()
    return contextlib.nullcontext()


@contextlib.contextmanager
def _without_recorded_functions() -> Iterator[None]:
    torch._C._autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch._C._autograd._enable_record_function(True)


def from_first(function: Callable[[], Any], group: dist.ProcessGroup | None) -> Any:
    """Returns the first rank's result of a function on all ranks, or raises its error on all."""
    if not dist.is_initialized():
        return function()
    outcome: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            outcome[0] = function()
        except Exception as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, group=group, group_src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def from_all(own: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Returns the value of each rank, by rank."""
    if not dist.is_initialized():
        return [own]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, own, group=group)
    return gathered


def require_all(function: Callable[[], None], group: dist.ProcessGroup | None) -> None:
    """Calls a function on all ranks; raises the first failing rank's error on all of them."""
    failure: Exception | None = None
    try:
        function()
    except Exception as error:
        failure = error
    for found in from_all(failure, group):
        if found is not None:
            raise found
