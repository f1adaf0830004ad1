"""Checks that all ranks hold the same model before they train it together.

`require_same_model` compares one fingerprint per rank in one collective, and locates the difference
only if fingerprints differ. Without the check, ranks whose models differ in a shape would deadlock
or sum gradients of different parameters. `broadcast_tensors` copies the first rank's values to all
ranks. The traffic per rank of both is independent of the number of ranks.
"""

import hashlib
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from paceline.core.errors import PacelineError
from paceline.parallel.buckets import plan_buckets, tensor_spec, view_like

_BROADCAST_BYTES = 256 * 2**20


class DisagreementError(PacelineError):
    """Ranks hold different models; the message names the first difference."""


def require_same_model(
    module: nn.Module, settings: str, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Raises on every rank unless all ranks have the same tensors and settings.

    Args:
        module: The model, whose parameters and buffers are compared by name, shape, strides, dtype
            and requires_grad.
        settings: Description of all else that must be equal, such as the bucket size.
        group: The ranks to compare.
        device: Device of the collectives.
    """
    own = describe_model(module, settings)
    number = fingerprint(own)
    extremes = torch.tensor([number, -number], dtype=torch.int64, device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    largest, negated_smallest = extremes.tolist()
    if largest != -negated_smallest:
        _raise_first_difference(own, group, device)


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


def _raise_first_difference(own: list[str], group: dist.ProcessGroup, device: torch.device) -> None:
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    reference = _broadcast_lines(own if rank == 0 else [], 0, group, device)
    pairs = zip(own, reference, strict=False)
    shorter = min(len(own), len(reference))
    first = next((index for index, (mine, theirs) in enumerate(pairs) if mine != theirs), shorter)
    # Encodes line and rank in one number, ordered by line first.
    place = torch.iinfo(torch.int64).max if own == reference else first * world_size + rank
    least = torch.tensor([place], dtype=torch.int64, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    index, culprit = divmod(int(least), world_size)
    culprits = _broadcast_lines(
        own[index : index + 1] if rank == culprit else [], culprit, group, device
    )
    first_has = reference[index] if index < len(reference) else "nothing"
    culprit_has = culprits[0] if culprits else "nothing"
    raise DisagreementError(
        f"the ranks' models differ: rank {dist.get_global_rank(group, 0)} has {first_has}, where "
        f"rank {dist.get_global_rank(group, culprit)} has {culprit_has}; build the same model on "
        "every rank"
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
    specs = [tensor_spec(str(index), tensor) for index, tensor in enumerate(chosen)]
    for plan in plan_buckets(specs, _BROADCAST_BYTES):
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
