"""The total norm of gradients, replicated on all ranks or sharded over them.

Each rank raises its norm to the power of the norm type, and the powers are summed over ranks in
float64. Ranks get bitwise equal results, which differ from a single process by less than the
rounding of the gradients' dtype. Nothing waits for the device, unless a norm that is not finite is
an error.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalGradients:
    """A rank's gradients as plain tensors, divided into replicated and sharded ones."""

    replicated: Sequence[Tensor] = ()
    """Gradients of which every rank holds all elements."""
    sharded: Sequence[Tensor] = ()
    """This rank's shards of gradients that are sharded over a group."""
    shard_group: dist.ProcessGroup | None = None
    """The ranks that hold the other elements; None if nothing is sharded."""


@torch.no_grad()
def clip_gradients(
    gradients: LocalGradients,
    max_norm: float,
    norm_type: float,
    device: torch.device,
    *,
    dtype: torch.dtype,
    error_if_nonfinite: bool,
) -> Tensor:
    """Clips all gradients to a total norm; returns the norm before clipping.

    Args:
        gradients: This rank's gradients; all ranks of the shard group must call this.
        max_norm: Largest total norm that is not scaled down.
        norm_type: 2 for the Euclidean norm, inf for the largest absolute value.
        device: The device of the returned norm.
        dtype: The dtype of the norm of sharded gradients, also on ranks that hold no shard.
        error_if_nonfinite: Whether to raise, on all ranks, if the norm is not finite.
    """
    if gradients.shard_group is None:
        total = torch.nn.utils.get_total_norm(gradients.replicated, norm_type).to(device)
    else:
        total = _norm_over_ranks(gradients, norm_type, device, gradients.shard_group).to(dtype)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the norm of order {norm_type:g} of all gradients is {float(total)}, so they cannot "
            "be clipped; skip this step, or pass error_if_nonfinite=False"
        )
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for gradient in (*gradients.replicated, *gradients.sharded):
        alike[gradient.device, gradient.dtype].append(gradient)
    for (of_device, _), group in alike.items():
        torch._foreach_mul_(group, coefficient.to(of_device))
    return total


def _norm_over_ranks(
    gradients: LocalGradients, norm_type: float, device: torch.device, group: dist.ProcessGroup
) -> Tensor:
    own = _norm(gradients.sharded, norm_type, device)
    of_replicated = _norm(gradients.replicated, norm_type, device)
    if norm_type == float("inf"):
        dist.all_reduce(own, dist.ReduceOp.MAX, group=group)
        return torch.maximum(own, of_replicated)
    powers = own**norm_type
    dist.all_reduce(powers, group=group)
    norm: Tensor = (powers + of_replicated**norm_type) ** (1 / norm_type)
    return norm


def _norm(gradients: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Returns the norm of a rank's own elements, without rounding to bf16 for bf16 gradients."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = [
        torch.linalg.vector_norm(
            gradient, norm_type, dtype=torch.promote_types(gradient.dtype, torch.float32)
        ).double()
        for gradient in gradients
    ]
    norm: Tensor = torch.linalg.vector_norm(
        torch.stack([norm.to(device) for norm in norms]), norm_type
    )
    return norm
