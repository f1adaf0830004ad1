"""The loss of logits that are whole, or split over the vocabulary by tensor ranks."""

import contextlib
from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor.parallel import loss_parallel

from paceline.parallel.buckets import whole_tensor


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the cross-entropy in float32, added up over all tokens that are here.

    Args:
        logits: (batch, sequence, vocabulary); where tensor ranks split the vocabulary, a DTensor.
        targets: The token that follows each, (batch, sequence).
    """
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
    return whole_tensor(loss)


@contextlib.contextmanager
def vocabulary_parallel(is_split: bool) -> Iterator[None]:
    """Computes the loss, and its gradient, of split logits without gathering them.

    Forward and backward both have to be inside.
    """
    with loss_parallel() if is_split else contextlib.nullcontext():
        yield
