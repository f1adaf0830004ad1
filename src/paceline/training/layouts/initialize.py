"""Initial weights of a model of which a rank has parts, the same as of a model in one piece.

The whole of a large model fits on no rank. It is laid out on the meta device, where tensors have no
values, and then every rank draws one matrix after the other as one process would, and keeps its
part: at no time does a rank hold more than one whole matrix. Every rank draws all of them, because
the values of one depend on how many were drawn before.
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.models import TransformerLM
from paceline.models.layers import RMSNorm
from paceline.models.transformer import draw_weight
from paceline.parallel.buckets import local_tensor


def leave_meta_device(part: nn.Module, device: torch.device) -> None:
    """Gives what this rank has of a model memory on a device, without values.

    Args:
        part: The model, or a stage of it, as it was laid out; left alone if it has memory already.
        device: Where this rank computes.
    """
    if any(parameter.is_meta for parameter in part.parameters()):
        part.to_empty(device=device)


@torch.no_grad()
def draw_parts(model: TransformerLM) -> None:
    """Draws the weights that this rank has of a model; the rest of it is on the meta device.

    Args:
        model: Laid over a mesh, with its parts on their device and without values.
    """
    model.positions.reset_buffers()
    if model.shape.tied_embeddings:
        # Leaving the meta device unties them, and a stage may have the one without the other.
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
    """Draws what torch's layers begin with, which on the meta device they have not done."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.Linear(module.in_features, module.out_features, bias=False, device="cpu")
        elif isinstance(module, nn.Embedding):
            nn.Embedding(module.num_embeddings, module.embedding_dim, device="cpu")


def _part_of(whole: Tensor, tensor: Tensor) -> Tensor:
    """Returns of a whole what this rank has of a tensor like it."""
    if not isinstance(tensor, DTensor):
        return whole
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole
