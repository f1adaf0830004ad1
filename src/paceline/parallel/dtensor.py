"""Tensors that may be DTensors: their local part, their whole, their gradients."""

import math
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec


def local_tensor(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor as a plain tensor that shares its memory."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def whole_tensor(tensor: Tensor) -> Tensor:
    """Returns the full tensor as a plain tensor; collective over the ranks that hold its parts."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def as_dtensor(local: Tensor, spec: DTensorSpec) -> DTensor:
    """Wraps this rank's rows in a DTensor that shares their memory, without communication."""
    # Only `__new__` makes the tensor; calling the class also enters and leaves torch's compiler.
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def num_shards(gradient: Tensor) -> int:
    """Returns the number of ranks of a stage over which a gradient is sharded."""
    if not isinstance(gradient, DTensor):
        return 1
    sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate())


def complete_gradients(model: nn.Module) -> None:
    """Sums gradients of which each tensor rank holds a partial sum.

    These are the gradients of norms under sequence parallelism, and of the embedding. FSDP2 sums
    them when it reduces gradients; without FSDP2, this function does. Norms are small and many, so
    one all-reduce sums all of them.
    """
    summands: dict[DeviceMesh, list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
    for parameter in model.parameters():
        gradient = parameter.grad
        if (
            isinstance(parameter, DTensor)
            and isinstance(gradient, DTensor)
            and parameter.placements == (Replicate(),)
            and gradient.placements == (Partial(),)
        ):
            summands[gradient.device_mesh].append((parameter, gradient.to_local()))
        else:
            complete_gradient(parameter)
    for mesh, parts in summands.items():
        together = torch.cat([own.flatten() for _, own in parts])
        dist.all_reduce(together, group=mesh.get_group())
        sums = torch.split(together, [own.numel() for _, own in parts])
        for (parameter, own), whole in zip(parts, sums, strict=True):
            parameter.grad = DTensor.from_local(
                whole.view_as(own), mesh, [Replicate()], run_check=False
            )


def complete_gradient(parameter: nn.Parameter) -> None:
    """Redistributes a gradient to the placements of its parameter, summing partial sums."""
    gradient = parameter.grad
    if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
        return
    if gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)
