"""The norm of all gradients, whether every rank holds them whole or each a shard of them.

The sum over ranks is taken in float64, of norms to the power of their type: ranks agree to the bit,
and differ from one process by less than their dtype rounds. Nothing waits for the device, unless
gradients that are not finite are to be an error.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalGradients:
    """A rank's gradients as plain tensors, and what other ranks hold of them."""

    replicated: Sequence[Tensor] = ()
    """Gradients of which every rank holds all elements."""
    sharded: Sequence[Tensor] = ()
    """This rank's elements of gradients that the ranks of a group share out."""
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
    """Scales all gradients down to a norm, if theirs is larger; returns theirs.

    Args:
        gradients: What this rank holds; all ranks of the shards' group call this together.
        max_norm: The largest norm that is left as it is.
        norm_type: 2 for the Euclidean norm, inf for the largest number.
        device: Where the norm is computed.
        dtype: What the norm of shards is returned in, on ranks that hold none too.
        error_if_nonfinite: Whether a norm that is not finite is an error, on all ranks alike.
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
    """Returns the norm of a rank's own elements; a gradient in bf16 is not rounded to it."""
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
