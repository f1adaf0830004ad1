"""Initializes a model that is split over ranks with the same weights as an unsplit model.

A large model does not fit on one rank. It is laid out on the meta device, where tensors have no
values. Every rank then draws one matrix after the other, as a single process would, and keeps its
part, so that it never holds more than one whole matrix. Every rank draws all matrices, because the
values of each depend on how many were drawn before.
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.models import TransformerLM
from paceline.models.layers import RMSNorm
from paceline.models.transformer import draw_weight
from paceline.parallel.buckets import local_tensor


def leave_meta_device(part: nn.Module, device: torch.device) -> None:
    """Allocates uninitialized memory for this rank's part of a model.

    Args:
        part: The model, or a stage of it, after layout; unchanged if it already has memory.
        device: Device to compute on.
    """
    if any(parameter.is_meta for parameter in part.parameters()):
        part.to_empty(device=device)


@torch.no_grad()
def draw_parts(model: TransformerLM) -> None:
    """Draws this rank's weights of a model; the rest of the model is on the meta device.

    Args:
        model: Laid over a mesh, with this rank's parts allocated but uninitialized.
    """
    model.positions.reset_buffers()
    if model.shape.tied_embeddings:
        # Leaving the meta device unties the weights, and a stage may have only one of them.
        has_embedding = not model.embedding.weight.is_meta
        tied = model.embedding.weight if has_embedding else model.head.weight
        model.embedding.weight = model.head.weight = tied
    _draw_as_constructors_do(model)
    for weight, std in model.initial_weights():
        whole = torch.empty(weight.shape, dtype=weight.dtype, device="cpu")
        draw_weight(whole, std)
        if not weight.is_meta:
            local_tensor(weight).copy_(_part_of(whole, weight))
    for module in model.modules():
        if isinstance(module, RMSNorm) and not module.weight.is_meta:
            local_tensor(module.weight).fill_(1.0)


def _draw_as_constructors_do(model: TransformerLM) -> None:
    """Draws the random numbers that torch's layers draw when constructed on a real device."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.Linear(module.in_features, module.out_features, bias=False, device="cpu")
        elif isinstance(module, nn.Embedding):
            nn.Embedding(module.num_embeddings, module.embedding_dim, device="cpu")


def _part_of(whole: Tensor, tensor: Tensor) -> Tensor:
    """Returns the part of a whole tensor that this rank has of a sharded tensor like it."""
    if not isinstance(tensor, DTensor):
        return whole
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole
