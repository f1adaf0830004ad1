"""The loss of logits, full or split over the vocabulary by tensor parallelism."""

import contextlib
from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor.parallel import loss_parallel

from paceline.parallel.buckets import whole_tensor


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the cross-entropy in float32, summed over this rank's tokens.

    Args:
        logits: (batch, sequence, vocabulary); a DTensor if tensor ranks split the vocabulary.
        targets: The next token of each position, (batch, sequence).
    """
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
    return whole_tensor(loss)


@contextlib.contextmanager
def vocabulary_parallel(is_split: bool) -> Iterator[None]:
    """Computes the loss of split logits, and its gradient, without gathering the logits.

    Forward and backward must both run inside the context.
    """
    with loss_parallel() if is_split else contextlib.nullcontext():
        yield
